"""Saved bytes against sizes counted by hand."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from playbook_utils.measure.saved import saved_for_backward


@pytest.mark.parametrize("rows", [1, 7])
def test_a_linear_layer_saves_its_input_alone(rows: int) -> None:
    model = nn.Linear(5, 3)
    with saved_for_backward(model) as saved:
        model(torch.ones(rows, 5))
    assert [(t.shape, t.dtype, t.storage_bytes) for t in saved.tensors] == [
        ((rows, 5), "float32", rows * 20)
    ]
    assert saved.total_bytes == rows * 20


def test_parameters_and_buffers_are_excluded_only_where_the_model_is_given() -> None:
    model = nn.Linear(5, 3)
    model.register_buffer("scale", torch.full((3,), 2.0))

    def forward() -> None:
        (model(torch.ones(2, 5, requires_grad=True)) * model.scale).sum()

    with saved_for_backward(model) as saved:
        forward()
    with saved_for_backward() as everything:
        forward()
    assert saved.total_bytes == 2 * 5 * 4
    assert everything.total_bytes == 2 * 5 * 4 + 3 * 5 * 4 + 3 * 4


def test_views_of_one_storage_count_once_and_a_slice_keeps_the_whole() -> None:
    x = torch.ones(6, 4, requires_grad=True)
    y = x * 1.0
    with saved_for_backward() as saved:
        y[:1].square()
        y[3:].square()
        y.square()
    assert saved.total_bytes == 6 * 4 * 4
    assert saved.tensors[0].shape == (1, 4)


def test_relu_saves_its_output_once_for_two_users() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
    with saved_for_backward(model) as saved:
        model(torch.ones(3, 5))
    assert saved.total_bytes == 3 * 5 * 4 + 3 * 8 * 4  # the input; relu's output, linear's too


def test_tied_weights_are_excluded_and_tokens_counted() -> None:
    embedding, head = nn.Embedding(11, 5), nn.Linear(5, 11, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head)
    with saved_for_backward(model) as saved:
        model(torch.zeros(4, dtype=torch.int64))
    assert [(t.dtype, t.storage_bytes) for t in saved.tensors] == [
        ("int64", 4 * 8),
        ("float32", 4 * 5 * 4),
    ]


def test_a_checkpoint_keeps_its_input_alone() -> None:
    model = nn.Sequential(nn.Linear(5, 80), nn.GELU(), nn.Linear(80, 5))
    x = torch.ones(3, 5, requires_grad=True)
    with saved_for_backward(model) as saved:
        checkpoint(model, x, use_reentrant=False)
    assert saved.total_bytes == 3 * 5 * 4
    with saved_for_backward(model) as plain:
        model(x)
    assert plain.total_bytes == 3 * 4 * (5 + 80 + 80)


def test_addresses_that_are_used_again_are_still_counted() -> None:
    with saved_for_backward() as saved:
        for _ in range(200):
            torch.ones(1000, requires_grad=True).exp()  # its graph is dropped at once
    assert saved.total_bytes == 200 * 4000


def test_a_graph_that_is_dropped_frees_its_tensors() -> None:
    with saved_for_backward():
        y = torch.ones(10, requires_grad=True).exp()  # saves its own output
        alive = weakref.ref(y)
        del y
        assert alive() is None


def test_second_derivatives_still_work() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with saved_for_backward():
        (first,) = torch.autograd.grad(x.exp().pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 9 * torch.exp(3 * x.detach()))


def test_recording_changes_no_gradient_and_nothing_after_the_block() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(3, 5)
    model(x).sum().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with saved_for_backward(model) as saved:
        loss = model(x).sum()
    loss.backward()
    before = saved.total_bytes
    model(x)
    assert saved.total_bytes == before
    for p, grad in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=0, atol=0)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(square := x * x)
        return x * square

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad * ctx.saved_tensors[0]


class _Block(nn.Module):
    """Named parts, an operator outside of them, and a custom function."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(5, 8), nn.Sequential(nn.GELU(), nn.Softmax(-1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Cube.apply(self.act(self.up(x)) * 2.0 / x.sum())


def test_each_tensor_names_the_module_and_the_operator_that_saved_it() -> None:
    model, x = _Block(), torch.ones(3, 5, requires_grad=True)
    with saved_for_backward(model) as saved:
        model(x).square()
    wide = 3 * 8 * 4
    assert [(t.module, t.operator, t.storage_bytes) for t in saved.tensors] == [
        ("up", "linear", 3 * 5 * 4),
        ("act.0", "gelu", wide),
        ("act.1", "softmax", wide),
        ("", "div", 4),
        ("", "div", wide),
        ("", "", wide),
        ("", "square", wide),
    ]
    assert saved.bytes_by_place() == {
        ("up", "linear"): 60,
        ("act.0", "gelu"): wide,
        ("act.1", "softmax"): wide,
        ("", "div"): wide + 4,
        ("", ""): wide,
        ("", "square"): wide,
    }
    assert sum(saved.bytes_by_place().values()) == saved.total_bytes


def test_without_a_model_operators_have_names_and_modules_none() -> None:
    with saved_for_backward() as saved:
        _Block()(torch.ones(3, 5, requires_grad=True))
    assert {t.module for t in saved.tensors} == {""}
    assert "gelu" in {t.operator for t in saved.tensors}


def test_a_forward_that_fails_leaves_no_hook_and_no_name_behind() -> None:
    model = _Block()
    with saved_for_backward(model) as saved:
        with pytest.raises(RuntimeError):
            model(torch.ones(3, 4))  # 4 features where 5 are expected
        torch.ones(2, requires_grad=True).exp()
    assert [(t.module, t.operator) for t in saved.tensors][-1] == ("", "exp")
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    count = len(saved.tensors)
    model(torch.ones(3, 5))
    assert len(saved.tensors) == count
