"""What `record_operators` counts, held against numbers counted by hand and addresses listed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from playbook_utils.measure import OperatorLog, record_operators
from playbook_utils.workers import launch

R, C = 6, 10
N = R * C

Row = tuple[str, int, int]
"""Operator, numbers read, numbers written (4 bytes each)."""


def rows_of(fn: Callable[..., object], *args: object) -> list[Row]:
    with record_operators() as log:
        fn(*args)
    assert all(row.read_bytes % 4 == row.written_bytes % 4 == 0 for row in log.rows)
    return [(row.op, row.read_bytes // 4, row.written_bytes // 4) for row in log.rows]


def given() -> SimpleNamespace:
    return SimpleNamespace(
        x=torch.randn(R, C), y=torch.randn(R, C), o=torch.randn(R, C), b=torch.randn(C),
        w=torch.randn(C, 3), bias=torch.randn(3), square=torch.randn(7, 7),
        q=torch.randn(1, 2, 8, 4), k=torch.randn(1, 2, 12, 4), table=torch.randn(100, 8),
        i=torch.tensor([1, 4]),
    )  # fmt: skip


CASES: dict[str, tuple[Callable[[Any], object], list[Row]]] = {
    # Inputs once, whatever way they are given.
    "two tensors": (lambda t: t.x + t.y, [("add", 2 * N, N)]),
    "one tensor twice": (lambda t: t.x * t.x, [("mul", N, N)]),
    "a tensor and a view of all of it": (lambda t: t.x * t.x.view(N).view(R, C), [("mul", N, N)]),
    "a tensor and its transpose": (lambda t: t.square + t.square.T, [("add", 49, 49)]),
    "two halves": (lambda t: t.x[:3] + t.x[3:], [("add", N, N // 2)]),
    "two overlapping parts": (lambda t: t.x[:5] + t.x[1:], [("add", N, 5 * C)]),
    "first and last row": (lambda t: t.x[0] + t.x[-1], [("add", 2 * C, C)]),
    "a number": (lambda t: 2 * t.x, [("mul", N, N)]),
    # Broadcasting.
    "a row": (lambda t: t.x + t.b, [("add", N + C, N)]),
    "an expanded row": (lambda t: t.x + t.b.expand(R, C), [("add", N + C, N)]),
    "an expanded row, copied": (lambda t: t.b.expand(R, C).contiguous(), [("clone", C, N)]),
    "every second column": (lambda t: t.x[:, ::2] * 2, [("mul", N // 2, N // 2)]),
    "sliding windows": (lambda t: t.b.unfold(0, 3, 1) * 2, [("mul", C, 8 * 3)]),
    # Views, and copies that were needed or not.
    "views": (lambda t: t.x.T[1:3].unsqueeze(0).expand(4, 2, R).detach().mT, []),
    "reshape without a copy": (lambda t: t.x.reshape(-1).contiguous(), []),
    "reshape with a copy": (lambda t: t.x.T.reshape(-1), [("clone", N, N)]),
    "a conversion": (lambda t: t.x.double(), [("_to_copy", N, 2 * N)]),
    "no conversion": (lambda t: t.x.to(torch.float32), []),
    "cat": (lambda t: torch.cat([t.x, t.x]), [("cat", N, 2 * N)]),
    "view in place": (lambda t: t.x.t_().unsqueeze_(0).squeeze_(0), []),
    # In place, out=, fills.
    "add in place": (lambda t: t.x.add_(t.y), [("add_", 2 * N, N)]),
    "add to itself": (lambda t: t.x.add_(t.x), [("add_", N, N)]),
    "a row in place": (lambda t: t.x[0].mul_(2), [("mul_", C, C)]),
    "out=": (lambda t: torch.exp(t.x, out=t.o), [("exp", N, N)]),
    "out= is an input": (lambda t: torch.exp(t.x, out=t.x), [("exp", N, N)]),
    "copy_": (lambda t: t.x.copy_(t.b), [("copy_", C, N)]),
    "a slice assigned": (lambda t: t.x[:2].copy_(t.b), [("copy_", C, 2 * C)]),
    "zero_ and fill_": (lambda t: t.x.zero_().fill_(1), [("zero_", 0, N), ("fill_", 0, N)]),
    "normal_": (lambda t: t.x.normal_(), [("normal_", 0, N)]),
    "made new": (lambda t: torch.zeros(R, C), [("zeros", 0, N)]),
    "made alike": (lambda t: torch.ones_like(t.x), [("ones_like", 0, N)]),
    "made by": (lambda t: t.x.new_full((3,), 1.0), [("new_full", 0, 3)]),
    "nothing made": (lambda t: torch.empty_like(t.x), []),
    # Reductions, products, fused operators.
    "sum": (lambda t: t.x.sum(), [("sum", N, 1)]),
    "row maxima": (lambda t: t.x.amax(-1), [("amax", N, R)]),
    "one number to Python": (lambda t: t.b[3].item(), [("_local_scalar_dense", 1, 0)]),
    "softmax": (lambda t: t.x.softmax(-1), [("_softmax", N, N)]),
    "matmul": (lambda t: t.x @ t.w, [("mm", N + 3 * C, 3 * R)]),
    "linear": (
        lambda t: F.linear(t.x, t.w.T, t.bias),
        [("addmm", N + 3 * C + 3, 3 * R)],
    ),
    "layer norm, with mean and rstd": (
        lambda t: F.layer_norm(t.x, (C,), t.b, t.o[0]),
        [("native_layer_norm", N + 2 * C, N + 2 * R)],
    ),
    "attention, with lse": (
        lambda t: F.scaled_dot_product_attention(t.q, t.k, t.k),
        [("_scaled_dot_product_flash_attention_for_cpu", 64 + 96, 64 + 16)],
    ),
    # By index.
    "embedding": (
        lambda t: F.embedding(torch.tensor([3, 3, 5]), t.table),
        [("embedding", 3 * 2 + 24, 24)],
    ),
    "rows by index": (
        lambda t: t.x[t.i], [("index", 2 * 2 + 2 * C, 2 * C)],
    ),
    "rows added by index": (
        lambda t: t.x.index_add_(0, t.i, t.y[:2]),
        [("index_add_", 2 * 2 + 2 * C + 2 * C, 2 * C)],
    ),
    "rows assigned by index": (
        lambda t: t.x.index_put_((t.i,), t.b), [("index_put_", 2 * 2 + C, 2 * C)],
    ),
    "a column's elements added by index": (
        lambda t: t.x.index_put_((t.i, t.i), t.b[:2], accumulate=True),
        [("index_put_", 2 * 2 + 2 + 2, 2)],
    ),
    # Lists.
    "foreach": (
        lambda t: torch._foreach_add_([t.x, t.b], [t.x.clone(), t.b]),
        [("clone", N, N), ("_foreach_add_", 2 * N + C, N + C)],
    ),
    "foreach, zeroed": (
        lambda t: torch._foreach_zero_([t.x, t.b]), [("_foreach_zero_", 0, N + C)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_counted_by_hand(name: str) -> None:
    fn, expected = CASES[name]
    assert rows_of(fn, given()) == expected


def test_a_mask_is_a_byte_an_element_and_what_dropout_keeps_is_written() -> None:
    x = torch.randn(R, C, requires_grad=True)
    with record_operators() as log:
        torch.where(x < 0, 0.0, x)
        torch.native_dropout(x, 0.5, train=True)
    moved = {row.op: (row.read_bytes, row.written_bytes) for row in log.rows}
    assert moved["lt"] == (4 * N, N)
    assert moved["where"] == (N + 4 * N + 4, 4 * N)  # 4: the zero, made a tensor
    assert sum(written for _, written in moved.values()) >= N + 4 * N + 4 + 4 * N + N


def test_backward() -> None:
    x, w = torch.randn(R, C), torch.randn(C, 3, requires_grad=True)
    loss = (x @ w).sum()
    expected = [("ones_like", 0, 1), ("mm", N + 1, 3 * C)]  # the gradient of a sum is one number
    assert rows_of(loss.backward) == expected
    again = (x @ w).sum()  # now it is added to the gradient that is there
    assert rows_of(again.backward) == [*expected, ("add_", 2 * 3 * C, 3 * C)]


def test_a_checkpoint_computes_again() -> None:
    x = torch.randn(R, C, requires_grad=True)
    counts = {}
    for name, fn in {
        "plain": lambda: x.exp().sin().sum().backward(),
        "checkpoint": lambda: checkpoint(
            lambda: x.exp().sin(), use_reentrant=False, preserve_rng_state=False
        ).sum().backward(),
    }.items():  # fmt: skip
        x.grad = None
        ops = [op for op, *_ in rows_of(fn)]
        counts[name] = ops.count("exp"), ops.count("sin"), ops.count("cos")
    assert counts == {"plain": (1, 1, 1), "checkpoint": (2, 1, 1)}  # it stops at what is needed


@pytest.mark.parametrize("scaled", [False, True])
def test_fused_adam_reads_gradients_and_writes_them_only_to_unscale(scaled: bool) -> None:
    p, g, m, v = (torch.ones(N) for _ in range(4))
    scale = torch.tensor(2.0) if scaled else None
    options = dict(amsgrad=False, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8)
    step = torch.tensor(1.0)
    ((_, read, written),) = rows_of(
        lambda: torch._fused_adamw_(
            [p], [g], [m], [v], [], [step], lr=0.1, maximize=False, grad_scale=scale, **options
        )
    )
    assert (read, written) == (4 * N + 1 + scaled, 3 * N + N * scaled)


def test_numbers_are_those_of_the_largest_tensor_or_list() -> None:
    x, b = torch.randn(R, C), torch.randn(C)
    with record_operators() as log:
        x.sum()
        b + x
        b.expand(R, C) * 2
        torch._foreach_mul([x, b], 2.0)
        x.bfloat16()
    assert [row.numbers for row in log.rows] == [N, N, N, N + C, N]
    assert log.rows[-1].moved_bytes == 6 * N
    assert log.moved_bytes == log.read_bytes + log.written_bytes
    assert log.read_bytes == sum(row.read_bytes for row in log.rows)


def addresses(x: Tensor) -> set[int]:
    places = itertools.product(*(range(n) for n in x.shape))
    steps = x.stride()
    first = x.storage_offset()
    return {first + sum(i * s for i, s in zip(p, steps, strict=True)) for p in places}


@pytest.mark.parametrize("seed", range(30))
def test_a_strided_input_is_read_at_its_distinct_addresses(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*values: int) -> int:
        return values[int(torch.randint(len(values), (), generator=generator))]

    x = torch.randn(4, 6, 8)
    for dim in range(3):
        start = draw(0, 1, 2)
        x = x[(slice(None),) * dim + (slice(start, None, draw(1, 2, 3)),)]
    x = x.permute(*torch.randperm(3, generator=generator).tolist())
    if draw(0, 1):
        x = x[:1].expand(draw(1, 5), *x.shape[1:])
    ((_, read, written),) = rows_of(lambda: x + 1)
    assert (read, written) == (len(addresses(x)), x.numel())


def add_shards() -> OperatorLog:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(R, C), mesh, [Shard(0)])
    with record_operators() as log:
        x + x
    return log


def test_of_a_dtensor_this_ranks_part_is_counted() -> None:
    for log in launch(add_shards, world_size=2):
        (row,) = log.rows
        assert (row.op, row.read_bytes, row.written_bytes) == ("add", 4 * N // 2, 4 * N // 2)


def test_nothing_is_counted_outside_and_blocks_nest() -> None:
    x = torch.randn(R, C)
    with record_operators() as outer:
        x + 1
        with record_operators() as inner:
            x + 2
    x + 3
    assert (len(outer.rows), len(inner.rows)) == (2, 1)
