"""A slow network, emulated, so that two cores can show communication hidden behind compute.

Inside the block a collective takes, on top of the real one, the time its bytes would take:
wire_bytes / bytes_per_s + latency_s. One background thread is the link: it serves the calls in
the order of issue, one at a time, and sleeps, so that it uses no processor. What is async
overlaps with compute and what is not does not, just as on a cluster.

    trace = TraceRecorder(rank)
    with slow_network(bytes_per_s=1e8, latency_s=1e-3, trace=trace):
        work = dist.all_reduce(grad, async_op=True)
        ...                                       # runs meanwhile
        work.wait()

The attributes of `torch.distributed` listed in `SLOWED` are replaced inside the block, for the
whole process, and always put back. So what is called as `dist.all_reduce(...)` is slowed;
what holds the function itself (`from torch.distributed import all_reduce`), and what never
comes by Python (DDP's reducer without a hook, FSDP2), is not. Left out: send and recv (the
receiver's clock would have to follow the sender's), coalesced calls, contention between ranks.
On a GPU the delay is the host's: `wait()` blocks the Python thread (not run on a GPU yet).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import queue
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from playbook_utils.measure.communication import record_communication
from playbook_utils.measure.traces import TraceRecorder

__all__ = ["SLOWED", "slow_network"]

SLOWED = (
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce"),
    *("all_to_all_single", "broadcast", "reduce"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
)
"""The functions of `torch.distributed` that a slow network slows."""


@contextlib.contextmanager
def slow_network(
    *,
    bytes_per_s: float,
    latency_s: float = 0.0,
    trace: TraceRecorder | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Slow this rank's collectives down inside the block; use it on every rank alike.

    Args:
        bytes_per_s: of the emulated link, for the bytes that one rank sends (`wire_bytes`).
        latency_s: added to each call between two or more ranks.
        trace: gets a span of kind and lane "communication" for each transfer, from when the
            link takes it up to when it is done, and an "idle" span on the lane "compute" for
            each wait for one.
        sleep: only tests need another one.

    Leaving the block waits for what is still under way, and raises what went wrong in a
    transfer that nobody waited for. After an exception in the block nothing is waited for.
    ValueError for a rate that is not positive and a negative latency; RuntimeError where a slow
    network is already active in this process.
    """
    if not bytes_per_s > 0:
        raise ValueError(f"bytes_per_s is {bytes_per_s}: expected more than 0")
    if not latency_s >= 0:
        raise ValueError(f"latency_s is {latency_s}: expected 0 or more")
    originals = {name: getattr(dist, name) for name in SLOWED if hasattr(dist, name)}
    if any(hasattr(function, "_slowed_by") for function in originals.values()):
        raise RuntimeError("a slow network is already active in this process: leave it first")
    link = _Link(bytes_per_s, latency_s, trace, sleep)
    for name, function in originals.items():
        setattr(dist, name, _slowed(function, link))
    try:
        yield
    except BaseException:
        link.close(wait=False)
        raise
    else:
        link.close(wait=True)
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


class SlowWork:
    """The handle of an async call on a slow network; a stand-in for `torch.distributed.Work`."""

    def __init__(self, real: Any, name: str, delay_s: float, trace: TraceRecorder | None) -> None:
        self._real, self._name = real, name
        self._delay_s, self._trace = delay_s, trace
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._error_seen = False
        self._real_future: Any = None
        with contextlib.suppress(RuntimeError):  # gloo's reduce_scatter has none
            self._real_future = real.get_future()
        devices: list[int | str | torch.device] = []
        if torch.cuda.is_available() and "nccl" in dist.get_backend():
            devices.append(torch.cuda.current_device())
        self._future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the transfer is done, and raise what went wrong in it, or TimeoutError."""
        start_s = self._trace.clock() if self._trace and not self._done.is_set() else None
        return self._wait(start_s, timeout)

    def _wait(self, start_s: float | None, timeout: timedelta | None = None) -> bool:
        done = self._done.wait(timeout.total_seconds() if timeout else None)
        if self._trace and start_s is not None:
            self._trace.add(f"wait {self._name}", "idle", start_s, self._trace.clock())
        if not done:
            raise TimeoutError(f"{self._name} is not done after {timeout}")
        if self._error is not None:
            self._error_seen = True
            raise self._error
        # On a GPU this makes the caller's stream, rather than the link's, wait for the result.
        self._real.wait()
        return True

    def is_completed(self) -> bool:
        """Whether the transfer is done, well or not."""
        return self._done.is_set()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the real call's result, done when the transfer is; RuntimeError where the
        backend has none for this call (gloo's reduce_scatter)."""
        if self._real_future is None:
            self._real.get_future()  # raises, and says so
        return self._future

    def _transmit(self, sleep: Callable[[float], None]) -> None:
        """Run in the link's thread: the real transfer first, so that all ranks are there."""
        start_s = self._trace.clock() if self._trace else 0.0
        value: Any = None
        try:
            self._real.wait()
            value = self._real_future.value() if self._real_future is not None else None
            sleep(self._delay_s)
        except BaseException as error:
            self._error = error
        if self._trace:
            end_s = self._trace.clock()
            self._trace.add(self._name, "communication", start_s, end_s, lane="communication")
        self._done.set()
        # Last: it runs callbacks of the user's, which may wait for this very call.
        if self._error is None:
            self._future.set_result(value)
        else:
            self._future.set_exception(self._error)


class _Link:
    """The thread that transfers one call after the other."""

    def __init__(
        self,
        bytes_per_s: float,
        latency_s: float,
        trace: TraceRecorder | None,
        sleep: Callable[[float], None],
    ) -> None:
        self.bytes_per_s, self.latency_s = bytes_per_s, latency_s
        self.trace, self.sleep = trace, sleep
        self._works: list[SlowWork] = []
        self._queue: queue.SimpleQueue[SlowWork | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="slow network", daemon=True)
        self._thread.start()

    def issue(self, real: Any, name: str, wire_bytes: int, alone: bool) -> SlowWork:
        delay_s = 0.0 if alone else self.latency_s + wire_bytes / self.bytes_per_s
        work = SlowWork(real, name, delay_s, self.trace)
        self._works.append(work)
        self._queue.put(work)
        return work

    def close(self, wait: bool) -> None:
        if not wait:
            self.sleep = lambda _: None
        self._queue.put(None)
        if wait:
            self._thread.join()
            for work in self._works:
                if work._error is not None and not work._error_seen:
                    raise work._error

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            work._transmit(self.sleep)


def _slowed(function: Callable[..., Any], link: _Link) -> Callable[..., Any]:
    """`function`, its real call issued here and now, its end put off by the link."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def slowed(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        is_async = bool(bound.arguments.get("async_op", False))
        bound.arguments["async_op"] = True
        start_s = link.trace.clock() if link.trace else None
        # A log of its own, to know the bytes; one that the user keeps sees the call as well.
        with record_communication() as log:
            real = function(*bound.args, **bound.kwargs)
        if real is None or not log.events:  # not in the group, or put off by coalescing
            return real
        name = f"{log.events[0].op} {_readable(log.payload_bytes())}"
        alone = len(log.events[0].group) == 1
        work = link.issue(real, name, log.wire_bytes(), alone)
        if is_async:
            return work
        work._wait(start_s)
        return None

    slowed._slowed_by = link  # type: ignore[attr-defined]
    return slowed


def _readable(size_bytes: int) -> str:
    power = next((i for i in range(3) if size_bytes < 1000 ** (i + 1)), 3)
    return f"{size_bytes / 1000**power:.4g} {('B', 'kB', 'MB', 'GB')[power]}"
