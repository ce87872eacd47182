"""Lesson 02's exercises three ways: stub -> not solved yet, solution -> passed, bugs -> failed."""

from __future__ import annotations

from tests.notebooks.exercises import Lesson, ThreeWays

LESSON = Lesson.read("02_activation_recomputation")

_KEPT = """\
        with torch.enable_grad():
            ctx.inputs = [t.detach().requires_grad_() for t in (a, b)]
            ctx.out = fn(*ctx.inputs)
        return ctx.out.detach()
"""

# what is wrong: (function, what stands there, what is put in its place, what the check says)
BUGS = {
    "x left where it hangs": (
        "run_again",
        "x.detach().requires_grad_()",
        "x",
        "went on into the layer that made x",
    ),
    "x itself made to keep a gradient": (
        "run_again",
        "x = x.detach().requires_grad_()",
        "x.retain_grad()",
        "went on into the layer that made x",
    ),
    "nothing recorded": (
        "run_again",
        "torch.enable_grad()",
        "torch.no_grad()",
        "found a result without a graph",
    ),
    "x alone": (
        "run_again",
        "    y.backward(grad)\n    return x.grad",
        "    return torch.autograd.grad(y, x, grad)[0]",
        "gradient of fn's weight: type: found NoneType",
    ),
    "gradient of the sum of y": (
        "run_again",
        "y.backward(grad)",
        "y.sum().backward()",
        "gradient of x",
    ),
    "run twice more": (
        "run_again",
        "y = fn(x)",
        "fn(x)\n        y = fn(x)",
        "calls of fn: found 2, expected 1",
    ),
    "a copy without gradients": (
        "run_again",
        "x.detach().requires_grad_()",
        "x.detach()",
        "only after requires_grad_()",
    ),
    "not given back": ("run_again", "return x.grad", "return grad", "gradient of x"),
    "one gradient too few": (
        "checkpoint_two",
        "return None, a.grad, b.grad",
        "return a.grad, b.grad",
        "returns, gradients needed by a and b: found 2, expected 3, one for each argument of apply",
    ),
    "one gradient not passed back": (
        "checkpoint_two",
        "return None, a.grad, b.grad",
        "return None, a.grad, None",
        "gradient of b",
    ),
    "not cut off": (
        "checkpoint_two",
        "t.detach().requires_grad_(need)",
        "t",
        "went on into what made a and b, gradients needed by a and b",
    ),
    "not cut off, gradients left to the second run": (
        "checkpoint_two",
        "        a, b = [t.detach().requires_grad_(need) for t, need in pairs]\n",
        "        a, b = ctx.saved_tensors\n",
        "went on into what made a and b, gradients needed by a and b",
    ),
    "second run not recorded": (
        "checkpoint_two",
        "with torch.enable_grad():",
        "with torch.no_grad():",
        "does not require grad",
    ),
    "activations kept in forward": (
        "checkpoint_two",
        "        ctx.save_for_backward(a, b)\n        return fn(a, b)\n",
        _KEPT,
        "expected the inputs alone",
    ),
    "no checkpoint at all": (
        "checkpoint_two",
        "return TwoInputs.apply(fn, a, b)",
        "return fn(a, b)",
        "still alive after forward",
    ),
    "torch's checkpoint, by hooks": (
        "checkpoint_two",
        "return TwoInputs.apply(fn, a, b)",
        "return torch.utils.checkpoint.checkpoint(fn, a, b, use_reentrant=False)",
        "no autograd.Function of your own",
    ),
    "torch's checkpoint, by a function": (
        "checkpoint_two",
        "return TwoInputs.apply(fn, a, b)",
        "return torch.utils.checkpoint.checkpoint(fn, a, b, use_reentrant=True)",
        "no autograd.Function of your own",
    ),
    "run three times": (
        "checkpoint_two",
        "            out = ctx.fn(a, b)\n",
        "            out = ctx.fn(a, b)\n            ctx.fn(a, b)\n",
        "calls of fn in all: found 3, expected 2",
    ),
    "gradient of the sum": (
        "checkpoint_two",
        "out.backward(grad)",
        "out.backward(torch.ones_like(grad))",
        "gradient of a",
    ),
    "state not set": ("remember", "torch.set_rng_state(state)", "pass", "result of again()"),
    "state not put back": ("remember", "torch.set_rng_state(now)", "pass", "as it found it"),
    "state taken too late": (
        "remember",
        "    return fn(*args), again",
        "    result = fn(*args)\n    state = torch.get_rng_state()\n    return result, again",
        "before the first run",
    ),
    "state put back after the first run": (
        "remember",
        "    return fn(*args), again",
        "    result = fn(*args)\n    torch.set_rng_state(state)\n    return result, again",
        "generator after the first run",
    ),
    "result kept": (
        "remember",
        "    return fn(*args), again",
        "    result = fn(*args)\n    return result, lambda: result",
        "calls of fn: found 1, expected 3",
    ),
    "seeded anew": (
        "remember",
        "    return fn(*args), again",
        "    torch.manual_seed(0)\n    state = torch.get_rng_state()\n    return fn(*args), again",
        "with the generator as it is",
    ),
    "square root": (
        "best_num_segments",
        "return min(range(1, num_layers + 1), key=most_held)",
        "return round(math.sqrt(num_layers))",
        "10 segments hold 1140 at the most, 96 hold 304",
    ),
    "one layer each, whatever they weigh": (
        "best_num_segments",
        "return min(range(1, num_layers + 1), key=most_held)",
        "return num_layers",
        "36 segments hold 37 at the most, 6 hold 12",
    ),
    "rounded down": (
        "best_num_segments",
        "math.ceil(num_layers / k)",
        "(num_layers // k)",
        "5 segments hold 13 at the most, 6 hold 12",
    ),
    "inputs forgotten": ("best_num_segments", "k * input_bytes + ", "", "found 36, expected 6"),
    "never one a layer": (
        "best_num_segments",
        "range(1, num_layers + 1)",
        "range(1, num_layers) or [1]",
        "found 48, expected 96",
    ),
    "the largest of the best": (
        "best_num_segments",
        "range(1, num_layers + 1)",
        "range(num_layers, 0, -1)",
        "4 segments hold as little as 3: return the smaller number",
    ),
    "all linear layers kept": (
        "keep_narrow",
        " and args[-1].shape[-1] <= max_width",
        "",
        "bytes kept, max_width=8, with bias",
    ),
    "nothing kept": ("keep_narrow", "MUST_SAVE", "PREFER_RECOMPUTE", "bytes kept"),
    "width of the input": (
        "keep_narrow",
        "args[-1].shape[-1]",
        "args[-1].shape[0]",
        "bytes kept",
    ),
    "strictly narrower": ("keep_narrow", "<= max_width", "< max_width", "bytes kept"),
    "only with a bias": (
        "keep_narrow",
        "op in linear",
        "op is torch.ops.aten.addmm.default",
        "without bias",
    ),
    "everything kept": (
        "keep_narrow",
        "return CheckpointPolicy.PREFER_RECOMPUTE",
        "return CheckpointPolicy.MUST_SAVE",
        "bytes kept",
    ),
    "head recomputed too": (
        "hfu_from_mfu",
        '"full": forward.layers',
        '"full": forward.total',
        "the head is not recomputed",
    ),
    "backward of the core too": (
        "hfu_from_mfu",
        "forward.attention_core,",
        "3 * forward.attention_core,",
        "one forward pass of the attention core",
    ),
    "one forward pass below": (
        "hfu_from_mfu",
        "/ (3 * forward.total)",
        "/ forward.total",
        "both are equal",
    ),
    "the other way round": (
        "hfu_from_mfu",
        "mfu * (3 * forward.total + once_more[recompute]) / (3 * forward.total)",
        "mfu * (3 * forward.total) / (3 * forward.total + once_more[recompute])",
        "selective",
    ),
}


class TestExercises(ThreeWays):
    lesson = LESSON
    bugs = BUGS
