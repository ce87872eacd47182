"""Lesson 06's exercises three ways: stub -> not solved yet, solution -> passed, bugs -> failed."""

from __future__ import annotations

from tests.notebooks.exercises import Lesson, ThreeWays

LESSON = Lesson.read("06_data_parallelism")

# what is wrong: (function, what stands there, what is put in its place, what the check says)
BUGS = {
    "summed": ("average_in_one_call", "flat /= dist.get_world_size()", "pass", "the mean"),
    "not put back": ("average_in_one_call", "grad.copy_(part.view_as(grad))", "pass", "gradient"),
    "put back in reverse": (
        "average_in_one_call",
        "zip(grads, flat.split([g.numel() for g in grads]), strict=True)",
        "zip(grads[::-1], flat.split([g.numel() for g in grads[::-1]]))",
        "in its own place",
    ),
    "a call for each": (
        "average_in_one_call",
        "    dist.all_reduce(flat)\n",
        "    parts = [grad.flatten() for grad in grads]\n"
        "    [dist.all_reduce(part) for part in parts]\n"
        "    flat = torch.cat(parts)\n",
        "found {'all_reduce': 4}, expected {'all_reduce': 1}",
    ),
    "frozen ones too": (
        "average_in_one_call",
        "grads = [p.grad for p in module.parameters() if p.grad is not None]",
        "grads = []\n"
        "    for p in module.parameters():\n"
        "        p.grad = torch.zeros_like(p) if p.grad is None else p.grad\n"
        "        grads.append(p.grad)",
        "a frozen parameter has none",
    ),
    "remainder forgotten": ("accumulation_steps", "if left or", "if", "look at the remainder"),
    "no step at all": (
        "accumulation_steps",
        "if left or steps == 0",
        "if left and steps",
        "ValueError",
    ),
    "microbatch forgotten": (
        "accumulation_steps",
        "* micro_batch_size ",
        "",
        "found 8, expected 4",
    ),
    "ranks forgotten": ("accumulation_steps", " * data_parallel_size", "", "found 512, expected 4"),
    "share only": ("loss_factor", " * dist.get_world_size()", "", "multiply by it"),
    "largest instead of sum": (
        "loss_factor",
        "all_reduce(total)",
        "all_reduce(total, dist.ReduceOp.MAX)",
        "factor for 64 of the tokens",
    ),
    "not summed": ("loss_factor", "dist.all_reduce(total)", "pass", "factor"),
    "first to last": ("fill_buckets", "reversed(range(len(sizes)))", "range(len(sizes))", "last"),
    "never full": ("fill_buckets", "<= limit", "< limit", "exactly full"),
    "over the limit": (
        "fill_buckets",
        "filled + sizes[index] <= limit",
        "filled <= limit",
        "limit",
    ),
    "an empty bucket first": (
        "fill_buckets",
        "if buckets and filled",
        "if not buckets:\n            buckets.append([])\n        if filled",
        "a bucket is empty",
    ),
    "one left out": ("fill_buckets", "range(len(sizes))", "range(1, len(sizes))", "in no bucket"),
    "a rank stays out": (
        "loss_factor",
        "    total =",
        "    if num_tokens == 0:\n        return 0.0\n    total =",
        "a rank without tokens takes part too",
    ),
    "no tokens, no error": ("accumulation_steps", " or steps == 0", "", "no tokens"),
    "scaled up": (
        "average_and_clip",
        "return torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)",
        "norm = torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)\n"
        "    [p.grad.mul_(2) for p in module.parameters() if p.grad is not None]\n"
        "    return norm",
        "untouched where it is not",
    ),
    "size never reset": (
        "fill_buckets",
        "filled = sizes[index]",
        "filled += sizes[index]",
        "found",
    ),
    "clipped first": (
        "average_and_clip",
        "    for param in",
        "    torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)\n    for param in",
        "norm",
    ),
    "norm after clipping": (
        "average_and_clip",
        "return torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)",
        "torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)\n"
        "    return torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)",
        "before clipping",
    ),
    "norm returned, nothing clipped": (
        "average_and_clip",
        "clip_grad_norm_(module.parameters(), max_norm)",
        "get_total_norm([p.grad for p in module.parameters() if p.grad is not None])",
        "gradient of 0.weight",
    ),
    "clipped value by value": (
        "average_and_clip",
        "clip_grad_norm_(module.parameters(), max_norm)",
        "clip_grad_value_(module.parameters(), max_norm)",
        "norm",
    ),
}


class TestExercises(ThreeWays):
    lesson = LESSON
    bugs = BUGS
