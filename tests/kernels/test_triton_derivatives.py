"""No operation of kernels.triton loses a gradient, first or second, without a word."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="made for Linux")
import kernels.triton
from kernels.triton import INTERPRETED

if not INTERPRETED:
    pytest.skip("on a GPU: tests/kernels/test_gpu.py", allow_module_level=True)

import kernels.triton.fp8_matmul as fp8
from tests.kernels.triton_reference import randn


def operations() -> dict[str, Callable[..., object]]:
    """Every module's function of its own name: what the package offers."""
    found = {}
    for module in pkgutil.iter_modules(kernels.triton.__path__):
        loaded = importlib.import_module(f"kernels.triton.{module.name}")
        if hasattr(loaded, module.name):
            found[module.name] = getattr(loaded, module.name)
    return found


def square(*shape: int) -> torch.Tensor:
    return randn(torch.float32, *(shape or (8, 8))).requires_grad_()


def vector() -> torch.Tensor:
    return (1 + randn(torch.float32, 8)).requires_grad_()


# The inputs of each: those that may want a gradient do.
INPUTS: dict[str, Callable[[], tuple[torch.Tensor, ...]]] = {
    "cross_entropy": lambda: (square(), torch.arange(8)),
    "elu": lambda: (square(),),
    "flash_attention": lambda: tuple(square(1, 1, 8, 8) for _ in range(3)),
    "fp8_matmul": lambda: tuple(
        x.requires_grad_(x.dtype == torch.float32)
        for quantize in (fp8.quantize_activations, fp8.quantize_weights)
        for x in quantize(square().detach())
    ),
    "layer_norm": lambda: (square(), vector(), vector()),
    "matmul": lambda: (square(), square()),
    "rms_norm": lambda: (square(), vector()),
    "softmax": lambda: (square(),),
    "vector_add": lambda: (square(), square()),
}
WITHOUT_BACKWARD = {"fp8_matmul", "vector_add"}


def test_every_operation_is_known_here() -> None:
    assert operations().keys() == INPUTS.keys()


@pytest.mark.parametrize("name", sorted(operations().keys() - WITHOUT_BACKWARD))
@pytest.mark.parametrize("loss", [lambda y: y.sum(), lambda y: y.pow(2).sum()], ids=["sum", "pow"])
def test_second_derivatives_are_refused(
    name: str, loss: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Of a sum the gradient that comes in is constant, and PyTorch's own refusal lets it pass."""
    fn, inputs = operations()[name], INPUTS[name]()
    wanting = [x for x in inputs if x.requires_grad]
    first = torch.autograd.grad(loss(fn(*inputs)), wanting)
    assert all(grad.abs().sum() > 0 for grad in first if name not in ("softmax", "layer_norm"))
    with pytest.raises(RuntimeError, match=rf"{name}: create_graph=True .* leave it out, or take"):
        torch.autograd.grad(loss(fn(*inputs)), wanting, create_graph=True)


@pytest.mark.parametrize("name", sorted(WITHOUT_BACKWARD))
def test_without_a_backward_gradients_are_refused(name: str) -> None:
    fn, inputs = operations()[name], INPUTS[name]()
    with pytest.raises(ValueError, match=rf"requires a gradient, and {name} has no backward: .*"):
        fn(*inputs)
    with torch.no_grad():
        found = fn(*inputs)
    assert torch.equal(found, fn(*(x.detach() for x in inputs)))
    for quantize in (fp8.quantize_activations, fp8.quantize_weights):
        with pytest.raises(ValueError, match=r"requires a gradient, and quantising .*"):
            quantize(square())
