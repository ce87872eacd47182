"""The log against what was asked for, in real processes, and against the loopback interface."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn

from playbook_utils.measure.communication import CommunicationLog, record_communication
from playbook_utils.predict.communication import wire_bytes
from playbook_utils.workers import launch

WORLD_SIZES = (1, 2, 3, 4)


def every_collective() -> CommunicationLog:
    """One call of each, on messages of n rows a rank where that applies (n: world size)."""
    n, rank = dist.get_world_size(), dist.get_rank()
    row = torch.ones(5)
    with record_communication() as log:
        dist.all_reduce(torch.ones(3, 7))
        dist.all_reduce(torch.ones(3, dtype=torch.bfloat16), async_op=True).wait()
        dist.broadcast(torch.ones(11, dtype=torch.int64), src=0)
        dist.reduce(torch.ones(4), dst=n - 1)
        dist.all_gather([torch.empty(5) for _ in range(n)], row)
        dist.all_gather_single(torch.empty(n, 5), row[None])
        dist.reduce_scatter(torch.empty(5), [row.clone() for _ in range(n)])
        dist.reduce_scatter_single(torch.empty(1, 5), torch.ones(n, 5))
        dist.gather(row, [torch.empty(5) for _ in range(n)] if rank == 0 else None, dst=0)
        dist.scatter(torch.empty(5), [row] * n if rank == 0 else None, src=0)
        dist.all_to_all_single(torch.empty(n, 5), torch.ones(n, 5))
        dist.barrier()
    return log


@pytest.mark.parametrize("n", WORLD_SIZES)
def test_every_collective_with_its_bytes(n: int) -> None:
    expected = [
        ("all_reduce", "float32", (3, 7), 84),
        ("all_reduce", "bfloat16", (3,), 6),
        ("broadcast", "int64", (11,), 88),
        ("reduce", "float32", (4,), 16),
        ("all_gather", "float32", (5,) if n == 1 else (5 * n,), 20 * n),
        ("all_gather", "float32", (n, 5), 20 * n),
        ("reduce_scatter", "float32", (5,) if n == 1 else (5 * n,), 20 * n),
        ("reduce_scatter", "float32", (n, 5), 20 * n),
        ("gather", "float32", (5,) if n == 1 else (5 * n,), 20 * n),
        ("scatter", "float32", (5,) if n == 1 else (5 * n,), 20 * n),
        ("all_to_all", "float32", (n, 5), 20 * n),
        ("barrier", None, (0,), 0),
    ]
    for rank, log in enumerate(launch(every_collective, world_size=n)):
        assert [event.index for event in log.events] == list(range(len(expected)))
        for event, (op, dtype, shape, payload) in zip(log.events, expected, strict=True):
            assert (event.rank, event.op, event.group) == (rank, op, tuple(range(n)))
            assert (event.shape, event.payload_bytes) == (shape, payload)
            assert event.wire_bytes == wire_bytes(op, payload, n)
            assert dtype is None or event.dtype == dtype
        assert log.calls() == len(expected)
        assert log.calls("all_reduce") == 2
        assert log.payload_bytes("all_reduce") == 90
        assert log.wire_bytes() == sum(event.wire_bytes for event in log.events)


def in_threads() -> tuple[list[str], list[str]]:
    tensor, pool = torch.ones(4), ThreadPoolExecutor(1)
    with record_communication() as log:
        with record_communication() as inner:
            thread = threading.Thread(target=dist.all_reduce, args=(tensor,))
            thread.start()
            thread.join()
        pool.submit(dist.broadcast, tensor, src=0).result()
    pool.submit(dist.all_reduce, tensor).result()  # the same thread, after the block
    pool.shutdown()
    with record_communication() as after:
        pass
    assert after.events == ()
    return [e.op for e in log.events], [e.op for e in inner.events]


def test_threads_started_inside_the_block_are_seen() -> None:
    expected = ["all_reduce", "broadcast"], ["all_reduce"]
    assert launch(in_threads, world_size=2) == [expected] * 2


def functional_collectives() -> CommunicationLog:
    n = dist.get_world_size()
    world = dist.group.WORLD
    with record_communication() as log:
        fc.all_reduce(torch.ones(6), "sum", world).sum().item()
        fc.all_gather_single(torch.ones(2, 3), 0, world).sum().item()
        x = torch.ones(2 * n, 3, requires_grad=True)
        fc.reduce_scatter_single_autograd(x, "sum", 0, world).sum().backward()
        fc.all_to_all_single(torch.ones(n, 2), None, None, world).sum().item()
        fc.broadcast(torch.ones(2), 0, world).sum().item()
        [t.sum().item() for t in fc.all_reduce_coalesced([torch.ones(2)] * 2, "sum", world)]
    return log


@pytest.mark.parametrize("n", [1, 3])
def test_functional_collectives(n: int) -> None:
    for log in launch(functional_collectives, world_size=n):
        assert [(event.op, event.payload_bytes) for event in log.events] == [
            ("all_reduce", 24),
            ("all_gather", 24 * n),
            ("reduce_scatter", 24 * n),
            ("all_gather", 24 * n),  # its backward
            ("all_to_all", 8 * n),
            ("broadcast", 8),
            ("all_reduce", 16),
        ]
        assert {event.group for event in log.events} == {tuple(range(n))}


def uneven_all_to_all() -> CommunicationLog:
    """Rank r hands r + 1 rows to itself and 1 row to each of the others."""
    n, rank = dist.get_world_size(), dist.get_rank()
    sends = [rank + 1 if peer == rank else 1 for peer in range(n)]
    with record_communication() as log:
        dist.all_to_all_single(torch.empty(sum(sends), 4), torch.ones(sum(sends), 4), sends, sends)
        dist.all_to_all([torch.empty(2) for _ in sends], [torch.ones(2) for _ in sends])
    return log


@pytest.mark.parametrize("n", [2, 3])
def test_uneven_all_to_all_counts_the_rows_that_leave(n: int) -> None:
    for rank, log in enumerate(launch(uneven_all_to_all, world_size=n)):
        rows, lists = log.events
        assert rows.payload_bytes == (n + rank) * 16
        assert rows.wire_bytes == (n - 1) * 16
        assert lists.payload_bytes == n * 8
        assert lists.wire_bytes == (n - 1) * 8


def point_to_point() -> CommunicationLog:
    rank = dist.get_rank()
    n = dist.get_world_size()
    with record_communication() as log:
        if rank == 0:
            dist.send(torch.ones(10), dst=2)
        elif rank == 2:
            dist.recv(torch.empty(10), src=0)
        if rank == 1:
            dist.recv(torch.empty(3))  # from whoever sends
        elif rank == 2:
            dist.isend(torch.ones(3), dst=1).wait()
        dist.barrier()  # else rank 1 might take rank 0's next message for the awaited one
        right, left = (rank + 1) % n, (rank - 1) % n
        ring = [
            dist.P2POp(dist.isend, torch.ones(2, 2), right),
            dist.P2POp(dist.irecv, torch.empty(2, 2), left),
        ]
        for work in dist.batch_isend_irecv(ring):
            work.wait()
    return log


def test_send_and_recv_name_their_peer() -> None:
    logs = launch(point_to_point, world_size=3)
    seen = [
        [(e.op, e.group, e.payload_bytes, e.wire_bytes) for e in log.events if e.op != "barrier"]
        for log in logs
    ]
    assert seen[0] == [
        ("send", (0, 2), 40, 40),
        ("send", (0, 1), 16, 16),
        ("recv", (0, 2), 16, 0),
    ]
    assert seen[1] == [
        ("recv", (1,), 12, 0),
        ("send", (1, 2), 16, 16),
        ("recv", (1, 0), 16, 0),
    ]
    assert seen[2] == [
        ("recv", (2, 0), 40, 0),
        ("send", (2, 1), 12, 12),
        ("send", (2, 0), 16, 16),
        ("recv", (2, 1), 16, 0),
    ]


def subgroups() -> CommunicationLog:
    rank = dist.get_rank()
    pair = dist.new_group([1, 3])
    even = dist.new_group([0, 2])
    with record_communication() as log:
        if rank in (1, 3):
            dist.all_reduce(torch.ones(8), group=pair)
            dist.broadcast(torch.ones(8), src=3, group=pair)
            fc.all_reduce(torch.ones(8), "sum", pair).sum().item()
            if rank == 1:
                dist.send(torch.ones(2), dst=3, group=pair)
            else:
                dist.recv(torch.empty(2), src=1, group=pair)
        else:
            dist.all_gather_single(torch.empty(4), torch.ones(2), group=even)
    return log


def test_groups_are_named_by_global_ranks() -> None:
    logs = launch(subgroups, world_size=4)
    assert [e.group for e in logs[1].events] == [(1, 3)] * 4
    assert [e.group for e in logs[3].events] == [(1, 3)] * 3 + [(3, 1)]
    assert logs[1].events[0].wire_bytes == 32  # 2 (2-1)/2 x 32: of the group, not the world
    assert [(e.group, e.payload_bytes) for e in logs[2].events] == [((0, 2), 16)]


def labels_and_coalescing() -> CommunicationLog:
    with record_communication() as outer, record_communication() as log:
        dist.all_reduce(torch.ones(2))
        with log.label("backward"):
            dist.all_reduce(torch.ones(2))
            with log.label("bucket 0"):
                dist.all_reduce(torch.ones(2))
            dist.all_reduce(torch.ones(2))
        with dist._coalescing_manager(), log.label("ignored: issued at the end"):
            dist.all_reduce(torch.ones(2))
            dist.all_reduce(torch.ones(3))
        objects: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(objects, "x" * 100)
    assert [e.op for e in outer.events] == [e.op for e in log.events]
    assert {e.label for e in outer.events} == {""}
    return log


def test_labels_coalesced_calls_and_objects() -> None:
    for log in launch(labels_and_coalescing, world_size=2):
        labels = [event.label for event in log.events[:4]]
        assert labels == ["", "backward", "bucket 0", "backward"]
        assert (log.events[4].payload_bytes, log.events[4].shape) == (20, (5,))
        objects = log.events[5:]
        assert objects and all(event.op == "all_gather" for event in objects)
        assert log.payload_bytes("all_gather") > 200  # the pickled strings of both ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu())


def train_ddp() -> tuple[CommunicationLog, list[int]]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(Block(), Block()), bucket_cap_mb=0.005
    )
    for _ in range(2):  # buckets are rebuilt after the first backward
        model(torch.randn(4, 16)).sum().backward()
    with record_communication() as log, log.label("backward"):
        model(torch.randn(4, 16)).sum().backward()
    sizes = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return log, [int(size) for size in str(sizes).split(",")]


def test_ddp_buckets_are_seen_in_backward() -> None:
    for log, bucket_sizes in launch(train_ddp, world_size=2):
        assert len(bucket_sizes) > 1
        assert [event.payload_bytes for event in log.events] == bucket_sizes
        assert {event.op for event in log.events} == {"all_reduce"}
        assert {event.label for event in log.events} == {"backward"}
        assert log.payload_bytes() == 4 * sum(
            p.numel() for p in nn.Sequential(Block(), Block()).parameters()
        )


def train_with_hooks_and_fsdp() -> tuple[CommunicationLog, CommunicationLog]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Block()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    with record_communication() as hooks:
        model(torch.randn(4, 16)).sum().backward()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = fully_shard(Block(), mesh=mesh)
    with record_communication() as fsdp:
        sharded(torch.randn(4, 16)).sum().backward()
    return hooks, fsdp


def test_autograd_hooks_and_fsdp2() -> None:
    params_bytes = 4 * sum(p.numel() for p in Block().parameters())
    for hooks, fsdp in launch(train_with_hooks_and_fsdp, world_size=2):
        assert hooks.calls("all_reduce") == hooks.calls() == 4
        assert hooks.payload_bytes() == params_bytes
        assert fsdp.payload_bytes("reduce_scatter") == params_bytes
        assert fsdp.payload_bytes("all_gather") % params_bytes == 0
        assert fsdp.calls("all_gather") >= 1


def train_tensor_parallel() -> tuple[CommunicationLog, CommunicationLog]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(Block(), mesh, {"a": ColwiseParallel(), "b": RowwiseParallel()})
    with record_communication() as log:
        model(torch.randn(4, 16, requires_grad=True)).sum().backward()
    rows = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    columns = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])
    with record_communication() as inside_an_operator:
        (rows + columns).to_local().sum().item()
    return log, inside_an_operator


def test_dtensor_collectives() -> None:
    for log, inside_an_operator in launch(train_tensor_parallel, world_size=2):
        assert [(e.op, e.shape) for e in log.events] == [("all_reduce", (4, 16))] * 2
        assert inside_an_operator.calls() == 1  # one side moves to the other's sharding


def test_a_log_is_plain_data_and_an_unknown_op_is_an_error() -> None:
    (log,) = launch(every_collective, world_size=1)
    assert pickle.loads(pickle.dumps(log)).events == log.events
    with pytest.raises(ValueError, match=r"unknown op 'allreduce'.*all_reduce"):
        log.calls("allreduce")


def loopback_sent_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])
    raise AssertionError("no loopback interface")


def big_all_reduce(numel: int) -> tuple[int, int]:
    dist.all_reduce(torch.ones(numel))  # connections are made here
    dist.barrier()
    before = loopback_sent_bytes()
    dist.barrier()
    with record_communication() as log:
        dist.all_reduce(torch.ones(numel))
    dist.barrier()
    return log.wire_bytes(), loopback_sent_bytes() - before


@pytest.mark.skipif(not Path("/proc/net/dev").exists(), reason="needs Linux's /proc/net/dev")
@pytest.mark.parametrize("n", [2, 4])
def test_all_reduce_sends_what_the_ring_says_on_the_real_interface(n: int) -> None:
    """Other traffic on the interface only adds, so a reading above the band is taken again."""
    for _ in range(5):
        results = launch(big_all_reduce, 4_000_000, world_size=n)
        ratio = results[0][1] / sum(wire for wire, _ in results)
        if ratio < 1.05:
            break
    assert 1.0 <= ratio < 1.05
