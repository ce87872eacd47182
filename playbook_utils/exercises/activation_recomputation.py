"""Exercises of lesson 02, activation recomputation: what is asked, and how an answer is checked.

    check(RUN_AGAIN, run_again)

Checks count how often a function runs and look whether its inner tensors are still alive, so
that the right gradient by keeping everything does not pass.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from playbook_utils.checks import Exercise, expect_close, expect_equal
from playbook_utils.errors import CheckFailed
from playbook_utils.measure import StepCost, step_cost
from playbook_utils.predict.flops import FlopCount

__all__ = ["HARDWARE", "NUM_SEGMENTS", "POLICY", "REMEMBER", "RUN_AGAIN", "TWO_INPUTS"]


class _Counted:
    """A function of two inputs that notes its calls and the storage of its inner tensor."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 7).double()
        self.calls = 0
        self.inner: StorageWeakRef | None = None

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        self.calls += 1
        hidden: Tensor = self.linear(a).tanh() * b.exp()  # (3, 7)
        self.inner = StorageWeakRef(hidden.untyped_storage())  # type: ignore[no-untyped-call]
        return hidden.sin()

    def is_held(self) -> bool:
        """Whether the inner tensor of the last call is still alive."""
        return self.inner is not None and not self.inner.expired()  # type: ignore[no-untyped-call]


def _two_tensors(a_needs: bool, b_needs: bool) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    a, b = torch.randn(3, 5, dtype=torch.float64), torch.randn(3, 7, dtype=torch.float64)
    return a.requires_grad_(a_needs), b.requires_grad_(b_needs)


def _verify_run_again(attempt: Callable[..., Any]) -> None:
    plain, fn = _Counted(), _Counted()
    (a, b), (leaf, other) = _two_tensors(True, False), _two_tensors(True, False)
    before = a.sin()
    before.retain_grad()
    result = plain(before, b)
    weight = torch.linspace(-1.0, 1.0, result.numel(), dtype=result.dtype).view_as(result)
    result.backward(weight)  # type: ignore[no-untyped-call]
    kept = leaf.sin()
    results = []

    def noted(x: Tensor) -> Tensor:
        results.append(fn(x, other))
        return results[-1]

    found = _called_in_backward(attempt, noted, kept, weight)
    expect_equal(fn.calls, 1, "calls of fn", hint="what was forgotten is computed again, once")
    if not results[0].requires_grad:
        raise CheckFailed(
            "the second run: found a result without a graph, expected one to go back through\n"
            "hint: inside backward nothing is recorded; run fn under torch.enable_grad()"
        )
    _expect_untouched(leaf)
    hint = "start backward from `grad`: y.backward(grad), and return the copy's gradient"
    if found is None:
        hint = "a detached copy gets a gradient only after requires_grad_()"
    expect_equal(found, before.grad, "gradient of x", hint=hint)
    for name, one in fn.linear.named_parameters():
        expected = plain.linear.get_parameter(name).grad
        hint = "y.backward(grad) fills the gradients of all that fn used"
        expect_equal(one.grad, expected, f"gradient of fn's {name}", hint=hint)


def _called_in_backward(attempt: Callable[..., Any], *args: Any) -> Any:
    """What `attempt` returns where nothing is recorded; None where nothing could go back."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # .grad of a tensor that is no leaf
            return attempt(*args)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        return None


def _expect_untouched(leaf: Tensor) -> None:
    if leaf.grad is not None:
        raise CheckFailed(
            "backward went on into the layer that made x: found a gradient there, expected None "
            "until PyTorch itself comes to it\nhint: detach x before the second run"
        )


def _verify_two_inputs(attempt: Callable[..., Any]) -> None:
    for needs in ((True, True), (True, False), (False, True)):
        plain, fn = _Counted(), _Counted()
        expected, found = _two_tensors(*needs), _two_tensors(*needs)
        result = plain(*map(torch.sin, expected))  # sin: what comes before, and keeps its input
        weight = torch.linspace(-1.0, 1.0, result.numel(), dtype=result.dtype).view_as(result)
        result.backward(weight)  # type: ignore[no-untyped-call]
        out = attempt(fn, *map(torch.sin, found))
        where = f"gradients needed by {_names(needs)}"
        expect_equal(out, result.detach(), f"fn(a, b), {where}", hint="return what fn returns")
        expect_equal(fn.calls, 1, "calls of fn in forward", hint="forward runs it once")
        if fn.is_held():
            raise CheckFailed(
                "an inner tensor of fn is still alive after forward: found its activations kept, "
                "expected the inputs alone\nhint: forward of an autograd.Function records no "
                "graph unless it is told to; recompute in backward"
            )
        own = getattr(type(out.grad_fn), "_forward_cls", None)
        if own is None or own.__module__.startswith("torch."):
            raise CheckFailed(
                "the result comes from no autograd.Function of your own\nhint: write a class "
                "with forward and backward, and return its apply(fn, a, b)"
            )
        _go_back(out, weight, where)
        for name, one, other in zip("ab", found, expected, strict=True):
            if other.grad is not None:
                hint = "detach and require a gradient of each input; return both gradients"
                expect_equal(one.grad, other.grad, f"gradient of {name}, {where}", hint=hint)
        for one, other in zip(fn.linear.parameters(), plain.linear.parameters(), strict=True):
            hint = "backward through the second run fills the parameters' gradients too"
            expect_equal(one.grad, other.grad, f"gradient of fn's parameters, {where}", hint=hint)
        expect_equal(fn.calls, 2, "calls of fn in all", hint="backward runs it once more")


def _go_back(out: Tensor, weight: Tensor, where: str) -> None:
    """Backward; fails where the second run is attached to what made a and b."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # .grad of a tensor that is no leaf
            out.backward(weight)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        counts = re.search(r"number of gradients \(expected (\d+), got (\d+)\)", str(error))
        if counts:
            raise CheckFailed(
                f"gradients that backward of your Function returns, {where}: found {counts[2]}, "
                f"expected {counts[1]}, one for each argument of apply\n"
                "hint: fn is an argument too; it has no gradient, so its place holds None"
            ) from error
        if "a second time" not in str(error):
            raise
        raise CheckFailed(
            f"backward of fn(a, b) went on into what made a and b, {where}: found their graph "
            "used twice, expected gradients of a and b alone\n"
            "hint: detach the inputs of the second run"
        ) from error


def _names(needs: tuple[bool, ...]) -> str:
    return " and ".join(name for name, needed in zip("ab", needs, strict=True) if needed)


def _verify_remember(attempt: Callable[..., Any]) -> None:
    calls = 0

    def noisy(x: Tensor, p: float) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.dropout(x, p, True) + torch.rand(x.shape)

    x, p = torch.ones(16), 0.5
    torch.manual_seed(5)
    expected, after = noisy(x, p), torch.get_rng_state()
    torch.manual_seed(5)
    calls = 0
    result, again = attempt(noisy, x, p)
    expect_equal(result, expected, "result", hint="run fn(*args) once, with the generator as it is")
    hint = "the first run moves the generator as a plain call does: don't put it back after it"
    _expect_state(after, "generator after the first run", hint)
    for number in (1, 2):
        torch.rand(3)
        before = torch.get_rng_state()
        hint = "take the generator's state before the first run, and set it before each other one"
        expect_equal(again(), expected, f"result of again(), call {number}", hint=hint)
        hint = "again() must leave the generator as it found it: the rest of the step draws too"
        _expect_state(before, f"generator after again(), call {number}", hint)
    expect_equal(calls, 3, "calls of fn", hint="again() computes; it keeps no result")


def _expect_state(expected: Tensor, what: str, hint: str) -> None:
    if not torch.equal(torch.get_rng_state(), expected):
        raise CheckFailed(f"{what}: found another state than expected\nhint: {hint}")


def _most_held(num_layers: int, input_bytes: int, layer_bytes: int, num_segments: int) -> int:
    """The inputs of all segments, and the inside of the largest one."""
    return num_segments * input_bytes + -(-num_layers // num_segments) * layer_bytes


def _verify_num_segments(attempt: Callable[[int, int, int], int]) -> None:
    cases = (
        *((36, 1, 1), (96, 2, 112), (12, 2, 2), (10, 1, 1), (32, 2, 32), (7, 5, 1), (1, 1, 1)),
        *((80, 4, 67), (126, 8, 127)),  # Llama 3 70B and 405B with flash attention
    )
    for case in cases:
        num_layers = case[0]
        held = {k: _most_held(*case, k) for k in range(1, num_layers + 1)}
        least = min(held.values())
        expected = min(k for k, value in held.items() if value == least)
        found = attempt(*case)
        if type(found) is int and found != expected and held.get(found) == least:
            hint = f"{found} segments hold as little as {expected}: return the smaller number"
        elif type(found) is int and found in held:
            hint = f"{found} segments hold {held[found]} at the most, {expected} hold {least}"
        else:
            hint = f"a whole number of segments, from 1 to {num_layers}"
        expect_equal(found, expected, f"num_segments{case}", hint=hint)


class _Layers(nn.Module):
    """MLP blocks of width 8 and 32, each run through `run(block, x)`."""

    def __init__(self, run: Callable[..., Any], bias: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.run = run
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(8),
                nn.Linear(8, 8, bias=bias),
                nn.Tanh(),
                nn.Linear(8, 32, bias=bias),
                nn.GELU(),
                nn.Linear(32, 8, bias=bias),
                nn.Tanh(),
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return x


def _verify_policy(attempt: Callable[[int], Callable[..., Any]]) -> None:
    tokens, width, wide = 6, 8, 32
    for bias in (True, False):
        expect = partial(_expect_policy, attempt, bias)
        both = 2 * 4 * tokens * (width + 2 * width)  # inputs, and two narrow results, float32
        expect(width, both, 2 * 2 * tokens * width * wide)
        expect(wide, both + 2 * 4 * tokens * wide, 0)


def _expect_policy(
    attempt: Callable[[int], Callable[..., Any]],
    bias: bool,
    max_width: int,
    kept_bytes: int,
    recomputed_flops: int,
) -> None:
    x = torch.linspace(-1.0, 1.0, 48).view(6, 8).requires_grad_()
    context = partial(torch_checkpoint.create_selective_checkpoint_contexts, attempt(max_width))
    run = partial(torch_checkpoint.checkpoint, use_reentrant=False, context_fn=context)
    plain, model = _Layers(lambda block, x: block(x), bias), _Layers(run, bias)
    costs: list[StepCost] = [step_cost(module, x) for module in (plain, model)]
    where = f"max_width={max_width}, {'with' if bias else 'without'} bias"
    hint = (
        "a linear layer is aten.addmm.default(bias, x, weight.T) with a bias and "
        "aten.mm.default(x, weight.T) without; the width of its result is the last argument's "
        "last size"
    )
    expect_equal(costs[1].kept_bytes, kept_bytes, f"bytes kept, {where}", hint=hint)
    again = costs[1].flops - costs[0].flops
    expect_equal(again, recomputed_flops, f"FLOPs computed again, {where}", hint=hint)
    grads = [_grads(module, x) for module in (plain, model)]
    for one, other in zip(*grads, strict=True):
        expect_equal(other, one, f"gradients, {where}")


def _grads(module: nn.Module, x: Tensor) -> list[Tensor]:
    module(x).square().sum().backward()
    found = [tensor.grad for tensor in (*module.parameters(), x) if tensor.grad is not None]
    x.grad = None
    return found


def _verify_hardware(attempt: Callable[[float, FlopCount, str], float]) -> None:
    forward = FlopCount(8_000, 16_000, 3_000, 2_000, 2_000)
    right = {
        "none": 0.4,
        "selective": 0.4 * (3 * 31_000 + 4_000) / (3 * 31_000),
        "full": 0.4 * (3 * 31_000 + 28_000) / (3 * 31_000),
    }
    hints = {
        "none": "nothing is computed again: both are equal",
        "selective": "one forward pass of the attention core is added to three of everything",
        "full": "one forward pass of the layers is added: the head is not recomputed",
    }
    for mode, expected in right.items():
        what = f'hfu_from_mfu(0.4, forward, "{mode}")'
        expect_close(attempt(0.4, forward, mode), expected, what, rtol=1e-9, hint=hints[mode])


RUN_AGAIN = Exercise(
    "run_again",
    "run fn again, and go backward through the second run",
    _verify_run_again,
    ("x.detach().requires_grad_(), then fn under torch.enable_grad(), then backward(grad)",),
)
TWO_INPUTS = Exercise(
    "checkpoint_two",
    "keep the two inputs, forget the rest, compute it again in backward",
    _verify_two_inputs,
    ("in backward, run fn under torch.enable_grad() on detached inputs",),
)
REMEMBER = Exercise(
    "remember",
    "run a function now, and exactly the same again later",
    _verify_remember,
    ("torch.get_rng_state() and torch.set_rng_state(state)",),
)
NUM_SEGMENTS = Exercise(
    "best_num_segments",
    "the number of segments that holds the fewest bytes at the most",
    _verify_num_segments,
    ("all segments' inputs, and the inside of the largest segment",),
)
POLICY = Exercise(
    "keep_narrow",
    "a policy that keeps the results of linear layers up to a width",
    _verify_policy,
    ("return CheckpointPolicy.MUST_SAVE or CheckpointPolicy.PREFER_RECOMPUTE",),
)
HARDWARE = Exercise(
    "hfu_from_mfu",
    "hardware FLOPs utilisation from model FLOPs utilisation",
    _verify_hardware,
    ("both divide by the same time and peak, so only the FLOPs differ",),
)
