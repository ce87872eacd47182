"""Costs of one forward and backward against counts by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from playbook_utils.measure import step_cost
from playbook_utils.measure.cost import count_flops


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 80), nn.GELU(), nn.Linear(80, 5))


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


def test_an_mlp_keeps_three_tensors_and_multiplies_four_or_six_times() -> None:
    x = torch.ones(3, 5, requires_grad=True)
    cost = step_cost(mlp(), x)
    assert cost.kept_bytes == 3 * 4 * (5 + 80 + 80)
    assert cost.forward_flops == 2 * 2 * 3 * 5 * 80
    assert cost.backward_flops == 2 * cost.forward_flops
    assert cost.flops == 3 * cost.forward_flops
    without = step_cost(mlp(), x.detach())
    assert without.backward_flops == cost.backward_flops - 2 * 3 * 5 * 80


def test_the_peak_holds_what_is_kept_and_a_gradient() -> None:
    class Exp(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp().exp()

    x = torch.ones(1000, requires_grad=True)
    cost = step_cost(Exp(), x)
    assert cost.kept_bytes == 3 * 4000  # the input, and exp keeps its results
    assert 4 * 4000 <= cost.peak_bytes < 5 * 4000


def test_a_checkpoint_keeps_its_input_and_multiplies_once_more() -> None:
    x = torch.ones(3, 5, requires_grad=True)
    plain, cost = step_cost(mlp(), x), step_cost(Recomputed(mlp()), x)
    assert cost.kept_bytes == 3 * 4 * 5
    assert cost.forward_flops == plain.forward_flops
    # torch stops before the last linear layer, whose result nobody needs
    assert cost.backward_flops == plain.backward_flops + 2 * 3 * 5 * 80


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flash_attention_is_counted_on_cpu_as_on_a_gpu(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 3, 16, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    out, forward_flops = count_flops(lambda: F.scaled_dot_product_attention(q, k, v))
    assert "Flash" in out.grad_fn.name()
    assert forward_flops == 2 * 2 * (2 * 3) * 16 * 16 * 8
    _, backward_flops = count_flops(out.sum().backward)
    assert backward_flops == 5 * forward_flops // 2  # scores again, and four products


def test_nothing_is_left_behind_and_the_generator_stays() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    x = torch.ones(2, 4, requires_grad=True)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, second = step_cost(module, x), step_cost(module, x)
    assert first == second
    assert torch.equal(before, torch.get_rng_state())
    assert x.grad is None and all(p.grad is None for p in module.parameters())


def test_two_outputs_and_other_arguments() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, factor: float, no: None) -> tuple[Tensor, Tensor]:
            return x.exp(), (x * factor).detach()

    x = torch.ones(6, requires_grad=True)
    cost = step_cost(Two(), x, 2.0, None)
    assert cost.kept_bytes == 2 * 6 * 4  # the input; exp keeps its result
    assert cost.flops == 0


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="no output needs a gradient"):
        step_cost(nn.Identity(), torch.ones(2))
    with pytest.raises(TypeError, match="module is a function"):
        step_cost(test_two_outputs_and_other_arguments)  # type: ignore[arg-type]
