"""What ran when on each rank: recorded by hand, by module hooks, or taken from torch's profiler.

    trace = TraceRecorder(rank=dist.get_rank())
    with trace.watch_module(model), trace.span("step", kind="compute"):
        loss = model(x).sum()
        loss.backward()
    return trace.spans                            # from a worker

    spans = merge_spans(launch(train, world_size=4))
    write_chrome_trace(spans, "step.json")        # open in ui.perfetto.dev or chrome://tracing
    overlap_s(spans, rank=0)

Times are seconds of the system's monotonic clock, which all processes of one machine share, so
that `merge_spans` only has to move the common zero. On a GPU give `device`: spans are then
timed by CUDA events on the current stream (that path has not been run on a GPU yet).

Writing and reading files is in `measure.chrome`, sums over spans in `measure.overlap`. Left out:
drawing (`show`), and aligning the clocks of several machines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from playbook_utils.events import Span
from playbook_utils.measure import private
from playbook_utils.measure.chrome import KINDS

__all__ = ["TraceRecorder", "merge_spans"]


class TraceRecorder:
    """Collects the spans of one rank.

    Args:
        rank: whose spans they are.
        device: a CUDA device whose streams are timed; None or a CPU takes the host's clock.
        clock: seconds; only tests need another one.
    """

    def __init__(
        self,
        rank: int = 0,
        device: torch.device | str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            raise ValueError(f"rank is {rank!r}: expected a whole number, at least 0")
        self.rank = rank
        self.clock = clock
        self._spans: list[Span] = []
        self._pending: list[tuple[Span, Any, Any]] = []
        self._anchor: tuple[float, Any] | None = None
        if device is not None and torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
            self._anchor = (clock(), self._event())

    @property
    def spans(self) -> tuple[Span, ...]:
        """All spans so far, by their start; a GPU is waited for."""
        if self._pending and self._anchor is not None:
            torch.cuda.synchronize()
            zero_s, anchor = self._anchor
            for span, start, end in self._pending:
                start_s = zero_s + anchor.elapsed_time(start) / 1e3  # elapsed_time is in ms
                end_s = zero_s + anchor.elapsed_time(end) / 1e3
                self._spans.append(replace(span, start_s=start_s, end_s=end_s))
            self._pending.clear()
        return tuple(sorted(self._spans, key=lambda span: (span.start_s, -span.end_s)))

    @contextmanager
    def span(self, name: str, kind: str = "compute", lane: str = "compute") -> Iterator[None]:
        """Record the block as one span. ValueError for a kind that is not in `KINDS`."""
        end = self._begin(name, kind, lane)
        try:
            yield
        finally:
            end()

    def add(
        self, name: str, kind: str, start_s: float, end_s: float, lane: str = "compute"
    ) -> None:
        """Record a span whose times (seconds of `clock`) are already known; from any thread."""
        _check_kind(kind)
        if end_s < start_s:
            raise ValueError(f"span {name!r} ends at {end_s} s, before its start {start_s} s")
        self._spans.append(Span(self.rank, name, kind, start_s, end_s, lane))

    @contextmanager
    def watch_module(
        self, model: nn.Module, select: Callable[[str, nn.Module], bool] | None = None
    ) -> Iterator[None]:
        """Record a forward and a backward span for parts of `model` inside the block.

        Args:
            model: its forward must be called as a module, not as a function.
            select: `select(name, module)` says which parts; by default the top-level ones, with
                containers (ModuleList, Sequential) opened: "embedding", "layers.0", ...

        A part's backward lasts from the gradient of its output to that of its input; where no
        input needs one, to the end of the whole backward. A forward that a checkpoint repeats
        is named "layers.0 again". Names are the module's names.
        """
        parts = [
            (name, part)
            for name, part in model.named_modules()
            if (select or _top_level_of(model))(name, part)
        ]
        if not parts:
            raise ValueError(f"no part of {type(model).__name__} was selected to be watched")
        handles = [handle for name, part in parts for handle in self._watch(name, part)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, name: str, kind: str, lane: str = "compute") -> Callable[[], None]:
        """Start a span; the function returned ends it, once."""
        _check_kind(kind)
        blank = Span(self.rank, name, kind, 0.0, 0.0, lane)
        ended = False
        start: Any = self.clock() if self._anchor is None else self._event()

        def end() -> None:
            nonlocal ended
            if ended:
                return
            ended = True
            if self._anchor is None:
                self._spans.append(replace(blank, start_s=start, end_s=self.clock()))
            else:
                self._pending.append((blank, start, self._event()))

        return end

    @staticmethod
    def _event() -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _watch(self, name: str, part: nn.Module) -> list[Any]:
        calls: list[tuple[Callable[[], None], list[torch.Tensor]]] = []

        def before(_: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            again = private.current_graph_task_id() != -1  # inside backward: a checkpoint
            end = self._begin(f"{name} again" if again else name, "forward")
            calls.append((end, _needing_grad((inputs, kwargs))))

        def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            end, inputs = calls.pop()
            end()
            self._watch_backward(name, inputs, _needing_grad(output))

        return [
            part.register_forward_pre_hook(before, with_kwargs=True),
            part.register_forward_hook(after, always_call=True),
        ]

    def _watch_backward(
        self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        ends: list[Callable[[], None]] = []

        def begin(*_: Any) -> None:
            ends.append(self._begin(name, "backward"))
            if not inputs:
                private.execution_engine.queue_callback(finish)

        def finish(*_: Any) -> None:
            while ends:
                ends.pop()()

        if outputs:
            register_multi_grad_hook(outputs, begin, mode="any")
            if inputs:
                register_multi_grad_hook(inputs, finish)


def merge_spans(spans_per_rank: Iterable[Sequence[Span]]) -> tuple[Span, ...]:
    """One timeline of several ranks' spans, its zero at the earliest start."""
    spans = [span for one_rank in spans_per_rank for span in one_rank]
    zero = min((span.start_s for span in spans), default=0.0)
    return tuple(
        replace(span, start_s=span.start_s - zero, end_s=span.end_s - zero) for span in spans
    )


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}: expected one of {', '.join(KINDS)}")


def _needing_grad(values: Any) -> list[torch.Tensor]:
    return [
        v for v in private.tree_leaves(values) if isinstance(v, torch.Tensor) and v.requires_grad
    ]


def _top_level_of(model: nn.Module) -> Callable[[str, nn.Module], bool]:
    opened: dict[str, nn.Module] = {}

    def collect(prefix: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            if isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
                collect(f"{prefix}{name}.", child)
            else:
                opened[prefix + name] = child

    collect("", model)
    return lambda name, _: name in opened
