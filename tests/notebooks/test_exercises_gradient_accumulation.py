"""Lesson 03's exercises three ways: stub -> not solved yet, solution -> passed, bugs -> failed."""

from __future__ import annotations

from tests.notebooks.exercises import Lesson, ThreeWays

LESSON = Lesson.read("03_gradient_accumulation")

# what is wrong: (function, what stands there, what is put in its place, what the check says)
BUGS = {
    "division forgotten": ("accumulate", " / len(parts)", "", "nothing divides by"),
    "divided after the sum": (
        "accumulate",
        "    return total",
        "    for param in model.parameters():\n"
        "        param.grad = param.grad / len(parts) if param.requires_grad else None\n"
        "    return total",
        "divided twice",
    ),
    "one call with all": (
        "accumulate",
        "    for tokens, targets in parts:",
        "    parts = [tuple(torch.cat(part) for part in zip(*parts))]\n"
        "    for tokens, targets in parts:",
        "one forward for each part",
    ),
    "backward after the loop": (
        "accumulate",
        "        loss.backward()\n        total += loss.detach()\n    return total",
        "        total = total + loss\n    total.backward()\n    return total.detach()",
        "call backward for each part",
    ),
    "cleared in the loop": (
        "accumulate",
        "        loss.backward()",
        "        model.zero_grad()\n        loss.backward()",
        "gradients were cleared within the loop",
    ),
    "the graph returned": ("accumulate", "loss.detach()", "loss", "return loss.detach()"),
    "sum of the losses": (
        "accumulate",
        "total += loss.detach()",
        "total += loss.detach() * len(parts)",
        "added up and not divided",
    ),
    "means of the parts": (
        "accumulate_tokens",
        'targets, reduction="sum") / max(num_tokens, 1)',
        "targets) / len(parts)",
        "mean of the parts' means",
    ),
    "means added up": (
        "accumulate_tokens",
        'targets, reduction="sum") / max(num_tokens, 1)',
        "targets)",
        "nothing divides by 4",
    ),
    "rows for tokens": (
        "accumulate_tokens",
        'targets, reduction="sum") / max(num_tokens, 1)',
        "targets) * len(tokens) / sum(len(x) for x, _ in parts)",
        "weigh it by its tokens",
    ),
    "mean times its tokens": (
        "accumulate_tokens",
        'targets, reduction="sum") / max(num_tokens, 1)',
        "targets) * int((targets != -100).sum()) / num_tokens",
        "has no mean, 0/0",
    ),
    "sums over parts": (
        "accumulate_tokens",
        "max(num_tokens, 1)",
        "len(parts)",
        "divided by the number of parts, expected T = 21",
    ),
    "all positions": (
        "accumulate_tokens",
        "int((targets != -100).sum())",
        "targets.numel()",
        "all positions: padding (-100) is no token",
    ),
    "sums never divided": ("accumulate_tokens", " / max(num_tokens, 1)", "", "divide by T = 21"),
    "clipped in the loop": (
        "train_step",
        "    loss = accumulate_tokens(model, parts)\n"
        "    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
        "    num_tokens = sum(int((y != -100).sum()) for _, y in parts)\n"
        "    loss = 0.0\n"
        "    for x, y in parts:\n"
        '        part = cross_entropy(model(x), y, reduction="sum") / num_tokens\n'
        "        part.backward()\n"
        "        loss += part.detach()\n"
        "        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
        "clip once, after the last part",
    ),
    "cleared too late": (
        "train_step",
        "    optimizer.zero_grad()  # once, before the first part\n"
        "    loss = accumulate_tokens(model, parts)\n",
        "    loss = accumulate_tokens(model, parts)\n    optimizer.zero_grad()\n",
        "clear before the first part",
    ),
    "in another order": (
        "train_step",
        "return loss, norm",
        "return norm, loss",
        "this is the loss",
    ),
    "no backward": ("accumulate", "        loss.backward()\n", "", "no backward reached it"),
    "never cleared": ("train_step", "optimizer.zero_grad()", "pass", "clear its gradients"),
    "not clipped": (
        "train_step",
        "clip_grad_norm_(model.parameters(), max_norm)",
        "clip_grad_norm_(model.parameters(), float('inf'))",
        "the norm is right and the step is not",
    ),
    "a step for each part": (
        "train_step",
        "    optimizer.step()",
        "    [optimizer.step() for _ in parts]",
        "step once a batch",
    ),
    "a schedule of parts": (
        "train_step",
        "scheduler.step()",
        "[scheduler.step() for _ in parts]",
        "step once a batch",
    ),
    "loss alone": ("train_step", "return loss, norm", "return loss", "return two things"),
    "returned after clipping": (
        "train_step",
        "return loss, norm",
        "return loss, min(norm, torch.tensor(max_norm))",
        "this is the norm after clipping",
    ),
    "mean of means": (
        "accumulate_stream",
        'targets, reduction="sum")\n        loss.backward()',
        "targets)\n        loss.backward()\n        loss = loss * int((targets != -100).sum())",
        'take sums, reduction="sum"',
    ),
    "mean over the number of parts": (
        "accumulate_stream",
        'targets, reduction="sum")\n        loss.backward()\n'
        "        num_tokens += int((targets != -100).sum())",
        "targets)\n        loss.backward()\n        num_tokens += 1",
        "mean of the parts' means",
    ),
    "a mean of nothing": (
        "accumulate_stream",
        'targets, reduction="sum")',
        "targets) * int((targets != -100).sum())",
        "has no mean, 0/0",
    ),
    "divided in the loop": (
        "accumulate_stream",
        "    for param in model.parameters():\n"
        "        if param.grad is not None:\n"
        "            param.grad /= num_tokens\n",
        "        for param in model.parameters():\n"
        "            if param.grad is not None:\n"
        "                param.grad /= num_tokens\n",
        "divide once, after the last",
    ),
    "counted before": (
        "accumulate_stream",
        "    num_tokens, total = 0, 0.0\n",
        "    num_parts = len(parts)\n    num_tokens, total = 0, 0.0\n",
        "count their tokens as they pass",
    ),
    "padding counted": (
        "accumulate_stream",
        "int((targets != -100).sum())",
        "targets.numel()",
        "padding (-100) is no token",
    ),
    "all parts held": (
        "accumulate_stream",
        "in parts:",
        "in list(parts):",
        "part 2 was taken after 0 forward passes, expected 1",
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
    "gradients not divided": (
        "accumulate_stream",
        "param.grad /= num_tokens",
        "pass",
        "divide by T",
    ),
    "loss not divided": (
        "accumulate_stream",
        "return total / num_tokens",
        "return total",
        "divide by T",
    ),
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
        "a frozen parameter has no gradient",
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
        "still scaled, by 1024",
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
        "still scaled, by 1024",
    ),
    "not cleared": ("scaled_step", "optimizer.zero_grad()", "pass", "clear its gradients"),
    "means of parts": (
        "scaled_step",
        'y, reduction="sum") / num_tokens',
        "y) * len(x) / len(tokens)",
        "weigh it by its tokens",
    ),
    "padding counted again": (
        "scaled_step",
        "int((targets != -100).sum())",
        "targets.numel()",
        "padding (-100) is no token",
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
        "this is the norm after clipping",
    ),
    "sum of all tokens": ("scaled_step", " / num_tokens", "", "divide by T = 21"),
    "the clip forgotten": (
        "scaled_step",
        "(model.parameters(), max_norm)",
        "(model.parameters(), 1e9)",
        "the norm is right and the step is not",
    ),
    "the last name for all": (
        "fp32_sums",
        "def add(param, total=sums[name]):\n            total += param.grad",
        "def add(param):\n            sums[name] += param.grad",
        "looked up when the hook runs",
    ),
    "replaced, not added": (
        "fp32_sums",
        "total += param.grad",
        "total.copy_(param.grad)",
        "add it to the sum, do not replace it",
    ),
    "hook of the gradient": (
        "fp32_sums",
        "register_post_accumulate_grad_hook(add)",
        "register_hook(add)",
        "passes a gradient",
    ),
    "keyed by parameter": ("fp32_sums", "sums[name]", "sums[param]", "{name: sum}"),
    "no hook at all": (
        "fp32_sums",
        "        handles.append(param.register_post_accumulate_grad_hook(add))\n"
        "    for tokens, targets in parts:\n"
        "        (cross_entropy(model(tokens), targets) / len(parts)).backward()\n",
        "        handles.append((add, param))\n"
        "    for tokens, targets in parts:\n"
        "        (cross_entropy(model(tokens), targets) / len(parts)).backward()\n"
        "        [add(param) for add, param in handles]\n"
        "    handles = []\n",
        "BF16 gradients at one time",
    ),
    "summed in BF16": ("fp32_sums", "dtype=torch.float32", "dtype=param.dtype", "dtype"),
    "rounded to BF16 each time": (
        "fp32_sums",
        "total += param.grad",
        "total.copy_(total.bfloat16() + param.grad)",
        "rounded to BF16 each time",
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
    "sum for mean": ("fp32_sums", " / len(parts)", "", "this is the sum over 64 parts"),
    "frozen with hooks": ("fp32_sums", "if not param.requires_grad", "if False", "skip the frozen"),
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
