"""The memory explorer: sliders and menus around the prediction of one rank's memory.

    show.memory_explorer()
    show.memory_explorer("llama-3-70b", gpu="h100-sxm", layout={"tp": 8, "sequence_parallel": True})

Presets, or a `config.json` by its path, fill the model's fields; any of them may then be changed.
Each change computes once and redraws bars, numbers and the GPU's line; settings that do not go
together show one sentence in place of the bars, and every control keeps its value.

A saved notebook does not show widgets: call `show.memory_bars` before it. Left out here: what is
computed (`memory_settings`) and how it is drawn (`memory_bars`, `memory_report`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from playbook_utils.predict.hardware import gpu as find_gpu
from playbook_utils.predict.hf_config import load_shape, read_config
from playbook_utils.predict.precision import recipe
from playbook_utils.predict.presets import PRESETS, preset
from playbook_utils.predict.shapes import ModelShape
from playbook_utils.show.memory_bars import memory_bars
from playbook_utils.show.memory_controls import CUSTOM, make_controls, set_value
from playbook_utils.show.memory_report import DIFFERENCES, explorer_html
from playbook_utils.show.memory_settings import (
    MOE_FIELDS,
    SHAPE_FIELDS,
    MemorySettings,
    explore_memory,
    largest_seq_len,
    shape_values,
)

__all__ = ["MemoryExplorer", "memory_explorer"]

_ALERT = 'role="alert"'
_LAYOUT_FIELDS = (
    *("dp", "tp", "cp", "pp", "ep", "zero_stage", "sequence_parallel"),
    *("schedule", "virtual_stages", "num_microbatches"),
)


def memory_explorer(
    model: str | ModelShape = "llama-3-8b", *, gpu: str | None = "h100-sxm", **settings: Any
) -> None:
    """Show the explorer, started from a model.

    Args:
        model: Name of a preset, path of a `config.json`, or a shape.
        gpu: Name of the GPU whose memory is drawn; None for no line.
        settings: Where the other controls start, as in `MemorySettings`: seq_len=8192,
            recompute="full", layout={"tp": 8}. The sequence is 4,096 tokens unless given, or as
            many as a model with learned positions has.

    Without ipywidgets the starting point is shown as a figure, with a note. Raises ValueError for
    an unknown name and where the start is impossible.
    """
    from IPython.display import display

    shape = model if isinstance(model, ModelShape) else load_shape(model)
    start = MemorySettings(shape, **settings)
    longest = largest_seq_len(shape)
    if longest is not None and "seq_len" not in settings:
        start = replace(start, seq_len=min(start.seq_len, longest))
    estimate = explore_memory(start)
    if isinstance(estimate, str):
        raise ValueError(f"the explorer cannot start there: {estimate}")
    accelerator = None if gpu is None else find_gpu(gpu)
    try:
        import ipywidgets  # noqa: F401
    except ImportError:
        label = shape.name or CUSTOM
        print(f"No sliders: `pip install ipywidgets` and restart the kernel. Shown: {label}")
        display(memory_bars({label: estimate}, gpu=accelerator))  # type: ignore[no-untyped-call]
        return
    name = None if accelerator is None else accelerator.name
    display(MemoryExplorer(start, gpu=name).box)  # type: ignore[no-untyped-call]


class MemoryExplorer:
    """The controls by name, what they show, and the wires between; display its `box`."""

    def __init__(self, start: MemorySettings, gpu: str | None = None) -> None:
        import ipywidgets

        self.base = start.base
        self.num_redraws = 0
        self._filling = False
        self.controls, groups = make_controls()
        self.note = ipywidgets.HTML()
        self.result = ipywidgets.HTML(layout={"width": "100%"})
        differences = ipywidgets.HTML(DIFFERENCES, layout={"width": "100%"})
        self.box = ipywidgets.VBox([groups, self.note, self.result, differences])
        with self._without_redrawing():
            self._fill_in(start, gpu)
        for name, control in self.controls.items():
            control.observe(self._handler(name), names="value")
        self._redraw()

    def settings(self) -> MemorySettings:
        """What the controls say now."""
        values = {name: control.value for name, control in self.controls.items()}
        shown = (*SHAPE_FIELDS, *(MOE_FIELDS if self.base.moe else ()))
        layout = {name: values[name] for name in _LAYOUT_FIELDS}
        # 0: as many as fill the pipeline.
        layout["num_microbatches"] = layout["num_microbatches"] or None
        return MemorySettings(
            self.base,
            {name: values[name] for name in shown},
            layout,
            seq_len=values["seq_len"],
            microbatch_size=values["microbatch_size"],
            precision=values["precision"],
            optimizer_bytes=values["optimizer_bytes"],
            recompute=values["recompute"],
            attention=values["attention"],
        )

    def _fill_in(self, start: MemorySettings, gpu: str | None) -> None:
        plain = ("seq_len", "microbatch_size", "optimizer_bytes", "recompute")
        values = {name: getattr(start, name) for name in plain}
        values["precision"] = recipe(start.precision).name
        values["attention"] = start.attention_used()
        layout = start.parallel_layout()
        values |= {name: getattr(layout, name) for name in _LAYOUT_FIELDS}
        values["num_microbatches"] = values["num_microbatches"] or 0
        self._set({**values, "gpu": gpu, "preset": _preset_of(start.base)})
        self._show_model(start.base, start.changes)

    def _show_model(self, shape: ModelShape, changes: Mapping[str, Any]) -> None:
        """Fill in the model's fields and hide those that it does not have."""
        self.base = shape
        self._set({**shape_values(shape), **changes})
        for name in MOE_FIELDS:
            self.controls[name].layout.display = None if shape.moe else "none"
        self.controls["num_kv_heads"].disabled = shape.mla is not None

    def _set(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            set_value(self.controls[name], value)

    @contextmanager
    def _without_redrawing(self) -> Iterator[None]:
        """While a preset fills in a dozen fields, none of them answers by itself."""
        self._filling = True
        try:
            yield
        finally:
            self._filling = False

    def _handler(self, name: str) -> Any:
        react = {"preset": self._take_preset, "config_path": self._take_config}.get(name)

        def changed(change: Any) -> None:
            if self._filling:
                return
            with self._without_redrawing():
                if react is not None:
                    react(change["new"])
                elif name in (*SHAPE_FIELDS, *MOE_FIELDS):
                    self._take_field(name, change["new"])
            self._redraw()

        return changed

    def _take_field(self, name: str, value: Any) -> None:
        """The model is none of the presets any more, nor what the file says."""
        self._set({"preset": CUSTOM, "config_path": ""})
        if _ALERT in self.note.value:
            self.note.value = ""
        if name == "num_heads" and self.base.mla is not None:
            self._set({"num_kv_heads": value})

    def _take_preset(self, name: str) -> None:
        if name != CUSTOM:
            self._set({"config_path": ""})
            self._take_shape(preset(name))

    def _take_config(self, path: str) -> None:
        if not path.strip():
            self.note.value = ""
            return
        try:
            shape, ignored = read_config(Path(path.strip()).expanduser())
        except (ValueError, RuntimeError) as error:  # the latter: nobody's home
            self.note.value = f"<span {_ALERT}>Not read: {escape(str(error))}</span>"
            return
        self._set({"preset": CUSTOM})
        unknown = f" Fields not known, left out: {', '.join(ignored)}." if ignored else ""
        self._take_shape(shape, f"Read {path.strip()}.{unknown}")

    def _take_shape(self, shape: ModelShape, note: str = "") -> None:
        """Show another model, with the attention it is trained with and no more tokens than it
        has positions for."""
        self._show_model(shape, {})
        self._set({"attention": MemorySettings(shape).attention_used()})
        longest = largest_seq_len(shape)
        if longest is not None and self.controls["seq_len"].value > longest:
            self._set({"seq_len": longest})
            note += f" Sequence set to {longest:,}: the model has no more positions."
        self.note.value = escape(note.strip())

    def _redraw(self) -> None:
        self.num_redraws += 1
        name = self.controls["gpu"].value
        self.result.value = explorer_html(self.settings(), find_gpu(name) if name else None)


def _preset_of(shape: ModelShape) -> str:
    return shape.name if PRESETS.get(shape.name) == shape else CUSTOM
