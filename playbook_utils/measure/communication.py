"""Every collective and send/recv of this rank, in the order of issue, with its bytes.

Works below `torch.distributed`, where each call becomes one operator of PyTorch's dispatcher, so
that nothing escapes: async calls, calls from autograd hooks, DDP's C++ reducer, FSDP2, DTensor,
functional collectives, coalesced and batched ones. `*_object` calls show up as the tensors that
they send.

    with record_communication() as log:
        with log.label("backward"):
            loss.backward()
    log.calls("all_reduce"), log.wire_bytes()
    return log            # from a worker: a log is plain data and can be pickled

Threads that are started inside the block are seen, too. Left out: times (`measure.traces`), threads
that were running before, and what `torch.compile` has already compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from playbook_utils.events import CollectiveEvent
from playbook_utils.measure import private
from playbook_utils.measure.operators import OperatorWatch
from playbook_utils.predict.communication import OPS, wire_bytes

__all__ = ["CommunicationLog", "record_communication"]


@dataclass
class CommunicationLog:
    """What one rank sent and received, filled while its `record_communication` block runs."""

    _events: list[CollectiveEvent] = field(default_factory=list)
    _label: str = ""
    _open: bool = True

    @property
    def events(self) -> tuple[CollectiveEvent, ...]:
        """All calls so far, in the order in which they were issued."""
        return tuple(self._events)

    def calls(self, op: str | None = None) -> int:
        """Number of calls, of one `op` or of all. ValueError for an op that does not exist."""
        return len(self._select(op))

    def payload_bytes(self, op: str | None = None) -> int:
        """Sum of the messages in bytes (K of the ring formulas), of one `op` or of all."""
        return sum(event.payload_bytes for event in self._select(op))

    def wire_bytes(self, op: str | None = None) -> int:
        """Bytes that this rank sends by the ring convention, of one `op` or of all."""
        return sum(event.wire_bytes for event in self._select(op))

    @contextmanager
    def label(self, text: str) -> Iterator[None]:
        """Give the calls issued inside the block this label; the innermost block wins."""
        outer, self._label = self._label, text
        try:
            yield
        finally:
            self._label = outer

    def _select(self, op: str | None) -> list[CollectiveEvent]:
        if op is not None and op not in OPS:
            raise ValueError(f"unknown op {op!r}: expected None or one of {', '.join(OPS)}")
        return [event for event in self._events if op is None or event.op == op]


@contextmanager
def record_communication() -> Iterator[CommunicationLog]:
    """Record every communication call that this rank issues inside the block.

    Blocks may be nested: each log gets every call once. An event is added when the call is
    issued, before it runs, so a call that fails is in the log too.
    """
    log, start = CommunicationLog(), Thread.start

    def start_recorded(thread: Thread) -> None:
        run = thread.run

        def recorded() -> None:  # the watch is a thread's own
            with _Recorder(log):
                run()

        if log._open:
            thread.run = recorded  # type: ignore[method-assign]
        start(thread)

    Thread.start = start_recorded  # type: ignore[method-assign, assignment]
    try:
        with _Recorder(log):
            yield log
    finally:
        log._open = False
        if Thread.start is start_recorded:  # not where another thread's block came on top
            Thread.start = start  # type: ignore[method-assign]


_CALLS: dict[str, tuple[str, str]] = {
    # operator: (op, the argument whose tensors are the message; "" where there is none)
    "c10d::_allgather_base_": ("all_gather", "output_tensor"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "c10d::allgather_": ("all_gather", "output_tensors"),
    "c10d::allgather_coalesced_": ("all_gather", "output_lists"),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", "outputs"),
    "c10d::allreduce_": ("all_reduce", "tensors"),
    "c10d::allreduce_coalesced_": ("all_reduce", "tensors"),
    "c10d::alltoall_": ("all_to_all", "input_tensors"),
    "c10d::alltoall_base_": ("all_to_all", "input"),
    "c10d::barrier": ("barrier", ""),
    "c10d::broadcast_": ("broadcast", "tensors"),
    "c10d::gather_": ("gather", "input_tensors"),
    "c10d::monitored_barrier_": ("barrier", ""),
    "c10d::recv_": ("recv", "tensors"),
    "c10d::recv_any_source_": ("recv", "tensors"),
    "c10d::reduce_": ("reduce", "tensors"),
    "c10d::reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "c10d::scatter_": ("scatter", "output_tensors"),
    "c10d::send": ("send", "tensors"),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", "input"),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", "inputs"),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", "input"),
    "_c10d_functional::all_reduce": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", "inputs"),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", "inputs"),
    "_c10d_functional::all_to_all_single": ("all_to_all", "input"),
    "_c10d_functional::broadcast": ("broadcast", "input"),
    "_c10d_functional::broadcast_": ("broadcast", "input"),
    "_c10d_functional::irecv": ("recv", "tensor"),
    "_c10d_functional::isend": ("send", "tensor"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs"),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", "input"),
    "_dtensor::shard_dim_alltoall": ("all_to_all", "input"),
}
# Their argument holds one rank's part, so that the message is N times as long.
_PER_RANK = {
    "c10d::gather_",
    "c10d::scatter_",
    "_c10d_functional::all_gather_into_tensor",
    "_c10d_functional::all_gather_into_tensor_coalesced",
    "_c10d_functional::all_gather_into_tensor_out",
}


class _Recorder(OperatorWatch):
    """Notes those operators that communicate, before they run."""

    def __init__(self, log: CommunicationLog) -> None:
        super().__init__()
        self.log = log

    def before(self, op: Any, passed: dict[str, Any]) -> None:
        """Add an event, or several for a batch."""
        name = op._schema.name
        if not self.log._open:  # a thread that outlives the block
            return
        if name in _CALLS:
            self._add(*_CALLS[name], passed, per_rank=name in _PER_RANK)
        elif name == "_c10d_functional::batch_p2p_ops":
            for kind, peer, tensor in zip(
                passed["op_list"], passed["peer_list"], passed["tensors"], strict=True
            ):
                one = {"tensor": tensor, "dst": peer, "group_name": passed["group_name"]}
                self._add("send" if kind == "isend" else "recv", "tensor", one)

    def _add(self, op: str, message: str, passed: dict[str, Any], per_rank: bool = False) -> None:
        group = _group(passed)
        ranks = tuple(dist.get_process_group_ranks(group))
        me = dist.get_rank()
        leaves = private.tree_leaves(passed.get(message))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        times = len(ranks) if per_rank else 1
        payload = times * sum(t.numel() * t.element_size() for t in tensors)
        if op in ("send", "recv"):
            peer = passed.get("dst", passed.get("src"))
            ranks = (me,) if peer is None else (me, ranks[peer])
            wire = wire_bytes(op, payload, world_size=2)
        elif op == "all_to_all":
            wire = payload - _own_part_bytes(passed, tensors, ranks.index(me), len(ranks))
        else:
            wire = wire_bytes(op, payload, len(ranks))
        dtype = "+".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors}))
        whole = len(tensors) == 1 and times == 1  # else the message is made of several tensors
        shape = tuple(tensors[0].shape) if whole else (times * sum(t.numel() for t in tensors),)
        index = len(self.log._events)
        self.log._events.append(
            CollectiveEvent(me, index, op, ranks, dtype, shape, payload, wire, self.log._label)
        )


def _group(passed: dict[str, Any]) -> dist.ProcessGroup:
    """The process group of a call: c10d operators carry it boxed, functional ones by name."""
    given = passed["process_group"] if "process_group" in passed else passed["group_name"]
    if isinstance(given, str):
        given = private.resolve_process_group(given)
    return given if isinstance(given, dist.ProcessGroup) else dist.ProcessGroup.unbox(given)


def _own_part_bytes(
    passed: dict[str, Any], tensors: list[torch.Tensor], position: int, world_size: int
) -> int:
    """Bytes of an all_to_all that a rank hands to itself; uneven splits are counted as they are.

    For equal splits the rest is (N-1)/N of the message, the ring convention.
    """
    if len(tensors) > 1:  # the list form: one tensor a rank
        return tensors[position].numel() * tensors[position].element_size()
    (message,) = tensors
    splits = passed.get("input_split_sizes")
    if not splits:
        return message.numel() * message.element_size() // world_size
    row_bytes = message.element_size() * (message.numel() // max(message.shape[0], 1))
    return int(splits[position]) * row_bytes
