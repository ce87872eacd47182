"""What one forward and backward costs: bytes kept between the two, bytes at the peak, FLOPs.

    cost = step_cost(model, tokens)
    cost.kept_bytes, cost.peak_bytes, cost.flops / cost.forward_flops

The pass is run twice: under `track_memory`, and under torch's `FlopCounterMode`. Both start from
the same random state, which is there again afterwards, and no gradients are left behind.

Bytes are those of activations: parameters and their gradients are left out, gradients of
activations and temporaries of operators are in. FLOPs are those of matrix multiplications and
attention, 2 for a multiply-add, as `FlopCounterMode` counts them, forward, backward and whatever is
computed again; torch has no entry for its CPU flash kernel, which is counted here by torch's own
rule for the CUDA kernel. Left out: what is kept but no operator made (a checkpoint's copy of the
random state), optimizer steps, time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from playbook_utils.measure import private
from playbook_utils.measure.memory import track_memory

__all__ = ["StepCost", "count_flops", "step_cost"]


@dataclass(frozen=True)
class StepCost:
    """Costs of one forward and backward; bytes of activations, counts of FLOPs."""

    kept_bytes: int
    """Held when forward is over, the inputs and all that backward needs; not the outputs."""
    peak_bytes: int
    """The most that is held at one time, gradients of activations and temporaries included."""
    forward_flops: int
    backward_flops: int
    """With what is computed again."""

    @property
    def flops(self) -> int:
        """Forward and backward together."""
        return self.forward_flops + self.backward_flops


def step_cost(module: nn.Module, *inputs: Any) -> StepCost:
    """Measure one forward of `module(*inputs)` and the backward of the sum of its outputs.

    Raises:
        TypeError: `module` is no nn.Module.
        ValueError: the output needs no gradient, so that there is no backward to measure.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}: expected an nn.Module")
    devices = sorted({p.device.index or 0 for p in module.parameters() if p.is_cuda})
    with torch.random.fork_rng(devices):
        kept_bytes, peak_bytes = _memory(module, inputs)
    with torch.random.fork_rng(devices):
        _clear(module, inputs)
        loss, forward_flops = count_flops(lambda: _forward(module, inputs))
        _, backward_flops = count_flops(loss.backward)
    _clear(module, inputs)
    return StepCost(kept_bytes, peak_bytes, forward_flops, backward_flops)


def count_flops(fn: Callable[[], Any]) -> tuple[Any, int]:
    """(result of `fn()`, FLOPs of its matrix multiplications and attention)."""
    # Not at the top: it takes half a second of every process that imports this wing.
    from torch.utils import flop_counter

    sdpa: Any = flop_counter.sdpa_flop_count
    backward: Any = flop_counter.sdpa_backward_flop_count
    mapping = {
        private.cpu_flash: lambda q, k, v, *_, **__: sdpa(q, k, v),
        private.cpu_flash_backward: lambda grad, q, k, v, *_, **__: backward(grad, q, k, v),
    }
    with flop_counter.FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        result = fn()
    return result, counter.get_total_flops()


def _memory(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[int, int]:
    _clear(module, inputs)
    with track_memory(module) as memory:
        with memory.step():
            loss = _forward(module, inputs)
        # The step's last sample is taken when forward's own variables are gone.
        kept_bytes = memory.samples[-1].activations_bytes - loss.nbytes
        with memory.step():
            loss.backward()  # type: ignore[no-untyped-call]
    held = (s.total_bytes - s.params_bytes - s.grads_bytes for s in memory.samples)
    return kept_bytes, max(held)


def _forward(module: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
    """The sum of the outputs: a number that keeps nothing of them for backward."""
    found = module(*inputs)
    outputs = found if isinstance(found, tuple) else (found,)
    loss = torch.stack([out.sum() for out in outputs if out.requires_grad] or [torch.zeros(())])
    if not loss.requires_grad:
        raise ValueError(
            "no output needs a gradient, so there is no backward: do the parameters or the "
            "inputs require one?"
        )
    return loss.sum()


def _clear(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    module.zero_grad()
    for value in inputs:
        if isinstance(value, Tensor):
            value.grad = None
