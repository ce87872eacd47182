"""Lesson 03's exercises three ways: stub -> not solved yet, solution -> passed, bugs -> failed."""

from __future__ import annotations

from tests.notebooks.exercises import Lesson, ThreeWays

LESSON = Lesson.read("03_gradient_accumulation")

# what is wrong: (function, what stands there, what is put in its place, what the check says)
BUGS = {
    "mean of means": (
        "accumulate_stream",
        'targets, reduction="sum")',
        "targets)",
        "weighs 1 / T",
    ),
    "padding counted": (
        "accumulate_stream",
        "int((targets != -100).sum())",
        "targets.numel()",
        "no padding",
    ),
    "all parts held": (
        "accumulate_stream",
        "in parts:",
        "in list(parts):",
        "part 1 was taken after 0 forward passes",
    ),
    "one large batch": (
        "accumulate_stream",
        "    for tokens, targets in parts:\n",
        "    parts = [tuple(torch.cat(part) for part in zip(*parts))]\n"
        "    for tokens, targets in parts:\n",
        "use each part as it comes",
    ),
    "one backward at the end": (
        "accumulate_stream",
        "        loss.backward()\n"
        "        num_tokens += int((targets != -100).sum())\n"
        "        total += loss.item()\n"
        "    for param",
        "        num_tokens += int((targets != -100).sum())\n"
        "        total = total + loss\n"
        "    total.backward()\n"
        "    total = total.item()\n"
        "    for param",
        "call backward for each part",
    ),
    "gradients not divided": ("accumulate_stream", "param.grad /= num_tokens", "pass", "gradient"),
    "loss not divided": ("accumulate_stream", "return total / num_tokens", "return total", "loss"),
    "forward twice": (
        "accumulate_stream",
        "loss.backward()",
        "loss.backward(), model(tokens)",
        "no part twice",
    ),
    "frozen ones too": (
        "accumulate_stream",
        "if param.grad is not None:",
        "param.grad = torch.zeros_like(param) if param.grad is None else param.grad\n"
        "        if True:",
        "a frozen parameter has none",
    ),
    "frozen ones forgotten": (
        "accumulate_stream",
        "if param.grad is not None:",
        "if True:",
        "one division at the end",
    ),
    "last batch dropped": (
        "batches_of",
        "while batch := list(islice(parts, num_microbatches)):",
        "while len(batch := list(islice(parts, num_microbatches))) == num_microbatches:",
        "no part is lost",
    ),
    "a list anew": ("batches_of", "parts = iter(parts)", "pass", "none comes twice"),
    "all parts read": ("batches_of", "iter(parts)", "iter(list(parts))", "use yield"),
    "an empty last batch": (
        "batches_of",
        "while batch := list(islice(parts, num_microbatches)):\n        yield batch",
        "batch = [None]\n    while batch:\n"
        "        batch = list(islice(parts, num_microbatches))\n        yield batch",
        "the last batch may be shorter",
    ),
    "clipped before unscaling": (
        "scaled_step",
        "    scaler.unscale_(optimizer)\n"
        "    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()\n",
        "    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()\n"
        "    scaler.unscale_(optimizer)\n",
        "unscaled, of the whole batch",
    ),
    "one backward for all parts": (
        "scaled_step",
        "scaler.scale(loss).backward()\n",
        "total = loss + (total if 'total' in locals() else 0)\n"
        "    scaler.scale(total).backward()\n",
        "call backward for each part",
    ),
    "step for each part": (
        "scaled_step",
        "scaler.scale(loss).backward()",
        "scaler.scale(loss).backward()\n        scaler.step(optimizer)\n        scaler.update()",
        "hint: ",
    ),
    "unscaled for each part": (
        "scaled_step",
        "scaler.scale(loss).backward()",
        "scaler.scale(loss).backward()\n        scaler.unscale_(optimizer)",
        "once: unscale_",
    ),
    "never unscaled": (
        "scaled_step",
        "    scaler.unscale_(optimizer)\n",
        "",
        "unscaled, of",
    ),
    "not cleared": ("scaled_step", "optimizer.zero_grad()", "pass", "step 1"),
    "means of parts": (
        "scaled_step",
        'y, reduction="sum") / num_tokens',
        "y) * len(x) / len(tokens)",
        "of the whole batch",
    ),
    "padding counted again": (
        "scaled_step",
        "int((targets != -100).sum())",
        "targets.numel()",
        "norm before clipping",
    ),
    "optimizer steps by itself": (
        "scaled_step",
        "scaler.step(optimizer)",
        "optimizer.step()",
        "'step': 1",
    ),
    "no update": ("scaled_step", "scaler.update()", "pass", "update"),
    "number of parts for their size": ("scaled_step", "split(", "chunk(", "rows in each forward"),
    "overflow not told": (
        "scaled_step",
        "return norm if math.isfinite(norm) else None",
        "return norm",
        "returned after an overflow",
    ),
    "norm after clipping": (
        "scaled_step",
        "    scaler.step(optimizer)\n",
        "    norm = nn.utils.get_total_norm([p.grad for p in optimizer.param_groups[0]['params']])"
        ".item()\n    scaler.step(optimizer)\n",
        "norm before clipping",
    ),
    "summed in BF16": ("fp32_sums", "dtype=torch.float32", "dtype=param.dtype", "dtype"),
    "rounded to BF16 each time": (
        "fp32_sums",
        "total += param.grad",
        "total.copy_(total.bfloat16() + param.grad)",
        "FP32 from the first addition",
    ),
    "one backward for all sums": (
        "fp32_sums",
        "        (cross_entropy(model(tokens), targets) / len(parts)).backward()\n",
        "        handles.append(cross_entropy(model(tokens), targets) / len(parts))\n"
        "    sum(loss for loss in handles if torch.is_tensor(loss)).backward()\n"
        "    handles = [handle for handle in handles if not torch.is_tensor(handle)]\n",
        "call backward for each part",
    ),
    "gradients stay": ("fp32_sums", "param.grad = None", "param.grad.zero_()", "at one time"),
    "hooks stay": ("fp32_sums", "handle.remove()", "pass", "remove the hooks"),
    "sum for mean": ("fp32_sums", " / len(parts)", "", "divide by their number"),
    "frozen with hooks": ("fp32_sums", "if not param.requires_grad", "if False", "skip frozen"),
    "all at once": (
        "fp32_sums",
        "    for tokens, targets in parts:\n",
        "    parts = [tuple(torch.cat(part) for part in zip(*parts))]\n"
        "    for tokens, targets in parts:\n",
        "one forward a part",
    ),
    "gradients always counted": (
        "plan_step",
        "grads_bytes if size < sequences else 0",
        "grads_bytes",
        "no gradients",
    ),
    "gradients never counted": (
        "plan_step",
        "grads_bytes if size < sequences else 0",
        "0",
        "one byte less",
    ),
    "does not divide": ("plan_step", "if fits and sequences % size == 0", "if fits", "hint"),
    "smallest first": ("plan_step", "range(sequences, 0, -1)", "range(1, sequences + 1)", "found"),
    "remainder dropped": ("plan_step", "if left or ", "if ", "no whole number of sequences"),
    "full is not full": ("plan_step", "<= memory_bytes", "< memory_bytes", "plan_step"),
    "does not fit, no error": (
        "plan_step",
        'raise ValueError("not even one sequence fits")',
        "return 1, sequences",
        "do not fit",
    ),
}


class TestExercises(ThreeWays):
    lesson = LESSON
    bugs = BUGS
