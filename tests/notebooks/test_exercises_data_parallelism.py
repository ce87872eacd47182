"""Lesson 06's exercises three ways: stub -> not solved yet, solution -> passed, bugs -> failed."""

from __future__ import annotations

from tests.notebooks.exercises import Lesson, ThreeWays

LESSON = Lesson.read("06_data_parallelism")

# what is wrong: (function, what stands there, what is put in its place, what the check says)
BUGS = {
    "summed": ("average_gradients", "param.grad /= dist.get_world_size(group)", "pass", "the mean"),
    "into another tensor": (
        "average_gradients",
        "dist.all_reduce(param.grad, group=group)",
        "dist.all_reduce(param.grad.clone(), group=group)",
        "still the rank's own gradients",
    ),
    "a rank stays out": (
        "average_gradients",
        "param.grad = torch.zeros_like(param)",
        "continue",
        "still makes the call",
    ),
    "all ranks, not the group": (
        "average_gradients",
        "dist.all_reduce(param.grad, group=group)",
        "dist.all_reduce(param.grad)",
        "of `group`",
    ),
    "divided after the sum": (
        "average_gradients",
        "        param.grad /= dist.get_world_size(group)\n"
        "        dist.all_reduce(param.grad, group=group)",
        "        dist.all_reduce(param.grad, group=group)\n"
        "        param.grad /= dist.get_world_size(group)",
        "divide before the sum",
    ),
    "waits in the hook": (
        "send_early",
        "works.append(dist.all_reduce(param.grad, group=group, async_op=True))",
        "dist.all_reduce(param.grad, group=group)",
        "asynchronous all_reduces on rank 0: found 0",
    ),
    "handles thrown away": ("send_early", "works.append(", "print(", "handles in the list"),
    "waits, and appends nothing": (
        "send_early",
        "works.append(dist.all_reduce(param.grad, group=group, async_op=True))",
        "works.append(dist.all_reduce(param.grad, group=group))",
        "async_op=True",
    ),
    "blocks in the hook": (
        "send_early",
        "works.append(dist.all_reduce(param.grad, group=group, async_op=True))",
        "works.append(dist.all_reduce(param.grad, group=group, async_op=True)); works[-1].wait()",
        "do not wait in the hook",
    ),
    "two ranks for ever": (
        "send_early",
        "dist.get_world_size(group)",
        "2",
        "the number of ranks is",
    ),
    "not the group": ("send_early", "group=group, async_op", "async_op", "of `group`"),
    "nothing returned": ("send_early", "return works", "pass", "handles in the list"),
    "sent, not divided": ("send_early", "param.grad /= dist.get_world_size(group)", "pass", "mean"),
    "all in the last hook": (
        "send_early",
        "    works = []\n\n"
        "    def send(param):\n"
        "        param.grad /= dist.get_world_size(group)\n"
        "        works.append(dist.all_reduce(param.grad, group=group, async_op=True))\n",
        "    works, ready = [], []\n\n"
        "    def send(param):\n"
        "        param.grad /= dist.get_world_size(group)\n"
        "        ready.append(param)\n"
        "        if len(ready) == len(params):\n"
        "            for p in ready:\n"
        "                works.append(dist.all_reduce(p.grad, group=group, async_op=True))\n",
        "calls before the last gradient",
    ),
    "first to last": ("fill_buckets", "reversed(range(len(sizes)))", "range(len(sizes))", "last"),
    "never full": ("fill_buckets", "<= limit", "< limit", "only when it is full"),
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
    "three at most": (
        "fill_buckets",
        "if buckets and filled",
        "if buckets and len(buckets[-1]) < 3 and filled",
        "only when it is full",
    ),
    "size never reset": (
        "fill_buckets",
        "filled = sizes[index]",
        "filled += sizes[index]",
        "found",
    ),
    "sent each time": (
        "accumulate",
        "nullcontext() if i == len(parts) else model.no_sync()",
        "nullcontext()",
        "all_reduces in 3 parts",
    ),
    "never sent": ("accumulate", "if i == len(parts)", "if i > len(parts)", "found 0, expected 1"),
    "parts summed": ("accumulate", " / num_microbatches", "", "number of parts"),
    "the whole batch at once": (
        "accumulate",
        "microbatches(batch, num_microbatches)",
        "[batch]",
        "rows of each forward",
    ),
    "one backward for all": (
        "accumulate",
        "            loss.backward()\n        total += loss.detach()\n",
        "            total += loss\n    total.backward()\n    total = total.detach()\n",
        "then backward, for each",
    ),
    "never finished": ("accumulate", "model.finish_gradients()", "pass", "calls of finish_grad"),
    "the last part's loss": ("accumulate", "total += loss", "total = loss", "mean of the parts"),
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
    "no tokens, no error": ("accumulation_steps", " or steps == 0", "", "no tokens"),
    "all summed": ("average_in_one_call", "flat /= dist.get_world_size()", "pass", "the mean"),
    "not put back": (
        "average_in_one_call",
        "param.grad.copy_(part.view_as(param))",
        "pass",
        "gradient",
    ),
    "put back in reverse": (
        "average_in_one_call",
        "in zip(params, flat.split([p.numel() for p in params]), strict=True)",
        "in zip(params[::-1], flat.split([p.numel() for p in params[::-1]]))",
        "in its place",
    ),
    "a call for each": (
        "average_in_one_call",
        "    dist.all_reduce(flat)\n",
        "    parts = list(flat.split(1000))\n"
        "    parts = [p.clone() for p in flat.split(20)]\n"
        "    [dist.all_reduce(part) for part in parts]\n"
        "    flat = torch.cat(parts)\n",
        "expected {'all_reduce': 1}",
    ),
    "frozen ones too": (
        "average_in_one_call",
        "[p for p in module.parameters() if p.requires_grad]",
        "list(module.parameters())",
        "a frozen parameter has none",
    ),
    "None dropped": (
        "average_in_one_call",
        "if p.requires_grad]",
        "if p.grad is not None]",
        "still makes the call",
    ),
    "share only": ("loss_factor", " * dist.get_world_size()", "", "multiply by it"),
    "largest instead of sum": (
        "loss_factor",
        "all_reduce(total)",
        "all_reduce(total, dist.ReduceOp.MAX)",
        "factor for 64 of the tokens",
    ),
    "not summed": ("loss_factor", "dist.all_reduce(total)", "pass", "factor"),
    "a rank without tokens stays out": (
        "loss_factor",
        "    total =",
        "    if num_tokens == 0:\n        return 0.0\n    total =",
        "a rank without tokens takes part too",
    ),
    "counted in float16": (
        "loss_factor",
        "torch.tensor(num_tokens, device=device())",
        "torch.tensor(num_tokens, dtype=torch.float16)",
        "factor for 4099 of the tokens",
    ),
    "scaled up": (
        "average_and_clip",
        "return torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)",
        "norm = torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)\n"
        "    [p.grad.mul_(2) for p in module.parameters() if p.grad is not None]\n"
        "    return norm",
        "untouched where it is not",
    ),
    "clipped first": (
        "average_and_clip",
        "    average_gradients(",
        "    torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)\n    average_gradients(",
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
        "gradient of first.weight",
    ),
    "clipped value by value": (
        "average_and_clip",
        "clip_grad_norm_(module.parameters(), max_norm)",
        "clip_grad_value_(module.parameters(), max_norm)",
        "norm",
    ),
    "a rank that skipped leaves its gradients out": (
        "average_and_clip",
        "if p.requires_grad]",
        "if p.grad is not None]",
        "still makes the call",
    ),
}


class TestExercises(ThreeWays):
    lesson = LESSON
    bugs = BUGS
