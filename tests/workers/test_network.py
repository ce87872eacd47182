"""Order and relations that hold by construction; no test looks at a clock's value alone.

The injected sleep waits until the test lets it go on (or notes what it was asked for), so that
a transfer lasts exactly as long as the test wants.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from playbook_utils.events import Span
from playbook_utils.measure import TraceRecorder, exposed_communication_s, overlap_s
from playbook_utils.measure.communication import record_communication
from playbook_utils.workers import launch
from playbook_utils.workers.network import SLOWED, slow_network

KB = torch.ones(250)  # 1000 bytes


def asked_delays() -> tuple[list[float], list[tuple[str, int]], list[float]]:
    n, delays = dist.get_world_size(), []
    x = torch.full((250,), float(dist.get_rank() + 1))
    with (
        record_communication() as log,
        slow_network(bytes_per_s=1000, latency_s=0.5, sleep=delays.append),
    ):
        dist.all_reduce(x)
        dist.all_reduce(KB.clone(), dist.ReduceOp.MAX, None, True).wait()
        dist.broadcast(KB.clone(), src=0)
        dist.all_gather_single(torch.empty(250 * n), KB)
        dist.reduce_scatter_single(torch.empty(250), torch.ones(250 * n))
        dist.all_to_all_single(torch.empty(250 * n), torch.ones(250 * n))
        dist.barrier()
    return delays, [(e.op, e.wire_bytes) for e in log.events], x.unique().tolist()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_delay_is_bytes_over_bandwidth_plus_latency(n: int) -> None:
    for delays, events, reduced in launch(asked_delays, world_size=n):
        ops = [op for op, _ in events]
        assert ops == [  # each once, though a second log counts the bytes
            *("all_reduce", "all_reduce", "broadcast", "all_gather"),
            *("reduce_scatter", "all_to_all", "barrier"),
        ]
        if n == 1:
            assert delays == [0.0] * 6
        else:
            assert delays == pytest.approx([0.5 + wire / 1000 for _, wire in events[:6]])
            assert delays[2:] == pytest.approx([1.5, *[0.5 + n - 1] * 3])
        assert reduced == [n * (n + 1) / 2]


def async_then_sync() -> tuple[list[str], tuple[Span, ...]]:
    """While a transfer sleeps until the caller lets it go, the caller goes on computing."""
    seen, let_go = [], threading.Event()
    trace = TraceRecorder(dist.get_rank())

    def sleep(_: float) -> None:
        assert let_go.wait(60)
        seen.append("transferred")

    with slow_network(bytes_per_s=1e3, trace=trace, sleep=sleep):
        first = dist.all_reduce(KB.clone(), async_op=True)
        second = dist.all_reduce(KB.clone(), async_op=True)
        with trace.span("work"):
            seen.append("computed")
        assert not first.is_completed() and not second.is_completed()
        let_go.set()
        second.wait()
        seen.append("waited")
        assert first.is_completed() and second.is_completed()
        dist.all_reduce(KB.clone())
        seen.append("returned")
    return seen, trace.spans


def test_async_calls_go_on_in_order_while_the_caller_computes() -> None:
    for seen, spans in launch(async_then_sync, world_size=2):
        assert seen == [
            *("computed", "transferred", "transferred", "waited"),
            *("transferred", "returned"),
        ]
        sent = [s for s in spans if s.lane == "communication"]
        assert [(s.kind, s.name) for s in sent] == [("communication", "all_reduce 1 kB")] * 3
        assert sent[0].end_s <= sent[1].start_s and sent[1].end_s <= sent[2].start_s
        (work,) = [s for s in spans if s.name == "work"]
        assert work.end_s <= sent[0].end_s


def backward_with_hooks(is_async: bool) -> tuple[float, float, list[float]]:
    """A backward that averages each gradient; each transfer sleeps 0.2 s, compute is tiny."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    works: list[Any] = []

    def average(p: nn.Parameter) -> None:
        work = dist.all_reduce(p.grad, dist.ReduceOp.AVG, async_op=is_async)
        works.append(work)
        time.sleep(0.05)  # stands for the backward of the layer below

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(average)
    trace = TraceRecorder(dist.get_rank())
    with slow_network(bytes_per_s=1e9, latency_s=0.2, trace=trace):
        with trace.span("backward", kind="backward"):
            model(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
        for work in works:
            if work is not None:
                work.wait()
    grads = [float(p.grad.sum()) for p in model.parameters()]
    rank = dist.get_rank()
    return overlap_s(trace.spans, rank), exposed_communication_s(trace.spans, rank), grads


def test_async_gradients_overlap_with_backward_and_sync_ones_do_not() -> None:
    overlapped = launch(backward_with_hooks, True, world_size=2)
    blocked = launch(backward_with_hooks, False, world_size=2)
    for (hidden, exposed, grads), (none, all_of_it, same) in zip(overlapped, blocked, strict=True):
        # Three transfers of at least 0.2 s each; three hooks of 0.05 s run beside them.
        assert hidden > 0.02 and hidden + exposed >= 0.6
        # A blocking call waits from before its transfer starts until after it ends.
        assert none == pytest.approx(0, abs=1e-9) and all_of_it >= 0.6
        assert grads == pytest.approx(same)


def fails() -> list[str]:
    """What a transfer raises comes out of wait(), and at the end where nobody waited."""
    said = []

    def sleep(_: float) -> None:
        raise OSError("cable cut")

    with slow_network(bytes_per_s=1e9, sleep=sleep):
        work = dist.all_reduce(KB.clone(), async_op=True)
        try:
            work.wait()
        except OSError as error:
            said.append(f"wait: {error}")
        try:
            work.get_future().wait()
        except OSError as error:
            said.append(f"future: {error}")
    try:
        with slow_network(bytes_per_s=1e9, sleep=sleep):
            dist.all_reduce(KB.clone(), async_op=True)
    except OSError as error:
        said.append(f"end: {error}")
    return said


def test_errors_of_a_transfer_surface() -> None:
    assert (
        launch(fails, world_size=2)
        == [["wait: cable cut", "future: cable cut", "end: cable cut"]] * 2
    )


def ddp_hook_uses_the_future() -> tuple[int, list[float]]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    delays: list[float] = []

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations as strings
        flat = bucket.buffer().div_(dist.get_world_size())
        future = dist.all_reduce(flat, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)
    with slow_network(bytes_per_s=1e6, sleep=delays.append):
        model(torch.full((1, 3), float(dist.get_rank()))).sum().backward()
    return len(delays), model.module.weight.grad.flatten().tolist()


def test_a_ddp_hook_can_use_the_future() -> None:
    assert launch(ddp_hook_uses_the_future, world_size=2) == [(1, [0.5] * 6)] * 2


def stays_clean() -> list[bool]:
    before = {name: getattr(dist, name) for name in SLOWED if hasattr(dist, name)}
    nested = wrong = False
    try:
        with slow_network(bytes_per_s=1e3, latency_s=100.0):
            replaced = dist.all_reduce is not before["all_reduce"]
            dist.all_reduce(KB.clone(), async_op=True)
            raise KeyError("stop")  # and do not wait for 100 seconds
    except KeyError:
        wrong = True
    with slow_network(bytes_per_s=1e9):
        try:
            with slow_network(bytes_per_s=1e9):
                pass
        except RuntimeError as error:
            nested = "already active" in str(error)
    after = {name: getattr(dist, name) for name in before}
    return [replaced, wrong, nested, after == before]


def test_torch_distributed_is_put_back() -> None:
    assert launch(stays_clean, world_size=2) == [[True] * 4] * 2


def test_a_timeout_of_wait_and_bad_arguments() -> None:
    with pytest.raises(ValueError, match="bytes_per_s is 0"), slow_network(bytes_per_s=0):
        pass
    nan = float("nan")
    with (
        pytest.raises(ValueError, match="latency_s is nan"),
        slow_network(bytes_per_s=1, latency_s=nan),
    ):
        pass
