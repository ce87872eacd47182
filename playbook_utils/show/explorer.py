"""The memory explorer: sliders and menus around the prediction of one rank's memory.

    show.memory_explorer()
    show.memory_explorer("llama-3-70b", gpu="h100-sxm", tp=8, sequence_parallel=True)

Presets, or a `config.json` by its path, fill the model's fields; any of them may then be changed.
Each change computes once and redraws bars, numbers and the GPU's line; settings that do not go
together show one sentence in place of the bars, and every control keeps its value.

A saved notebook does not show widgets: call `show.memory_bars` before it. Left out here: what is
computed and how it is drawn (`explorer_page`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from playbook_utils.predict.activations import ATTENTIONS, RECOMPUTE, default_attention
from playbook_utils.predict.hardware import GPUS
from playbook_utils.predict.hardware import gpu as find_gpu
from playbook_utils.predict.hf_config import load_shape, read_config
from playbook_utils.predict.layout import SCHEDULES
from playbook_utils.predict.precision import RECIPES
from playbook_utils.predict.presets import PRESETS, preset
from playbook_utils.predict.shapes import ModelShape
from playbook_utils.predict.training import (
    LAYOUT_FIELDS,
    MOE_FIELDS,
    SHAPE_FIELDS,
    Training,
    longest_seq_len,
    train,
)
from playbook_utils.show.explorer_page import DIFFERENCES, explorer_page, refusal
from playbook_utils.show.units import bytes_text

__all__ = ["MemoryExplorer", "memory_explorer", "with_labels"]

_CUSTOM = "custom"  # what the preset menu says once a field of the model was changed
_ALERT = 'role="alert"'
_GPUS = [(f"{name} ({bytes_text(gpu.memory_bytes)})", name) for name, gpu in GPUS.items()]


def _powers(first: int, last: int) -> tuple[int, ...]:
    return tuple(2**power for power in range(first, last + 1))


_CONTROLS: Mapping[str, Mapping[str, tuple[str, Any]]] = {
    "Model": {
        "preset": ("preset", [_CUSTOM, *PRESETS]),
        "config_path": ("config.json", "its path, then Enter"),
        "num_layers": ("layers L", 1),
        "num_heads": ("heads a", 1),
        "num_kv_heads": ("kv heads (GQA)", 1),
        "dim": ("hidden h", 1),
        "ff_dim": ("feed-forward h_ff", 1),
        "vocab_size": ("vocabulary v", 1),
        "mlp": ("FF activation", [("SwiGLU", "swiglu"), ("GELU", "gelu"), ("ReLU", "relu")]),
        "num_experts": ("experts", 1),
        "experts_per_token": ("experts a token", 1),
        "expert_ff_dim": ("width of an expert", 1),
        "tied": ("tied head", False),
    },
    "Training": {
        "seq_len": ("sequence s", _powers(7, 20)),
        "microbatch_size": ("micro-batch b", range(1, 65)),
        "precision": ("precision", list(RECIPES)),
        "optimizer_bytes": ("Adam moments (B)", 0),
        "recompute": ("recomputation", list(RECOMPUTE)),
        "attention": ("attention", list(ATTENTIONS)),
        "dropout": ("dropout", False),
        "gpu": ("GPU", [("none", None), *_GPUS]),
    },
    "Parallelism": {
        "dp": ("data dp", _powers(0, 12)),
        "tp": ("tensor tp (t)", _powers(0, 6)),
        "sequence_parallel": ("sequence parallel", False),
        "cp": ("context cp", _powers(0, 8)),
        "pp": ("pipeline pp", range(1, 65)),
        "schedule": ("schedule", list(SCHEDULES)),
        "virtual_stages": ("stages a rank", range(1, 9)),
        "num_microbatches": ("micro-batches/step", 0),
        "ep": ("expert ep", _powers(0, 8)),
        "zero_stage": ("ZeRO stage", range(4)),
    },
}
"""{group: {name: (label, what it offers)}}: see `_control`."""
_LABELS = {name: label for group in _CONTROLS.values() for name, (label, _) in group.items()}
_HINTS = {
    "optimizer_bytes": "bytes a parameter of Adam's two moments, beside the precision's others",
    "num_microbatches": "0: as many as fill the pipeline",
    "virtual_stages": "with the interleaved schedule: 2 or more",
}
"""Shown while the mouse rests on a control."""


def with_labels(sentence: str) -> str:
    """A message of `predict` in the page's words: a field by the label of its control, quoted.

    Names that are words of their own (tp, schedule) stay: the labels hold them.
    """
    for name, label in _LABELS.items():
        if "_" in name or name == "dim":
            sentence = re.sub(rf"\b(moe\.)?{name}\b", f'"{label}"', sentence)
    return sentence


def memory_explorer(
    model: str | ModelShape = "llama-3-8b", *, gpu: str | None = "h100-sxm", **settings: Any
) -> None:
    """Show the explorer, started from a model.

    Args:
        model: Name of a preset, path of a `config.json`, or a shape.
        gpu: Name of the GPU whose memory is drawn; None for no line.
        settings: Where the other controls start: seq_len=8192, recompute="full", tp=8. The
            sequence is 4,096 tokens unless given, or as many as the model has positions.

    Raises ValueError for an unknown name and where the start is impossible.
    """
    from IPython.display import display

    shape = model if isinstance(model, ModelShape) else load_shape(model)
    try:
        start = train(shape, **settings)
    except ValueError as error:
        raise ValueError(f"the explorer cannot start there: {error}") from None
    name = None if gpu is None else find_gpu(gpu).name
    display(MemoryExplorer(start, name).box)  # type: ignore[no-untyped-call]


class MemoryExplorer:
    """The controls by name, what they show, and the wires between; display its `box`."""

    def __init__(self, start: Training, gpu: str | None = None) -> None:
        import ipywidgets

        self.base = start.shape
        self._filling = False
        self.controls: dict[str, Any] = {}
        columns = []
        for title, group in _CONTROLS.items():
            made = {name: _control(name, offer) for name, (_, offer) in group.items()}
            self.controls |= made
            shown = [ipywidgets.HTML(f"<b>{title}</b>"), *made.values()]
            columns.append(ipywidgets.VBox(shown, layout={"width": "300px", "overflow": "hidden"}))
        self.note = ipywidgets.HTML()
        self.result = ipywidgets.HTML(layout={"width": "100%"})
        differences = ipywidgets.HTML(DIFFERENCES, layout={"width": "100%"})
        groups = ipywidgets.HBox(columns, layout={"flex_flow": "row wrap"})
        self.box = ipywidgets.VBox([groups, self.note, self.result, differences])
        degrees = {name: getattr(start.layout, name) or 0 for name in LAYOUT_FIELDS}
        recipe, shape = start.recipe, start.shape
        how = ("seq_len", "microbatch_size", "recompute", "attention")
        self._set(**{name: getattr(start, name) for name in how}, **degrees, gpu=gpu)
        self._set(optimizer_bytes=recipe.moments_bytes, precision=recipe.name)
        self._set(preset=shape.name if PRESETS.get(shape.name) == shape else _CUSTOM)
        self._show_model(shape)
        for name, control in self.controls.items():
            control.observe(partial(self._changed, name), names="value")
        self._redraw()

    def values(self) -> dict[str, Any]:
        """What the controls say now, as `train` takes it."""
        others = {"preset", "config_path", "gpu", *(() if self.base.moe else MOE_FIELDS)}
        values = {name: c.value for name, c in self.controls.items() if name not in others}
        return {**values, "num_microbatches": values["num_microbatches"] or None}

    def _set(self, **values: Any) -> None:
        """Set controls, and widen what one offers where its value is beyond that."""
        for name, value in values.items():
            control = self.controls[name]
            options = getattr(control, "options", None)
            if type(value) is int and options and value not in options:
                control.options = tuple(sorted({*options, value}))
            elif hasattr(control, "max") and value > control.max:
                control.max = value
            control.value = value

    def _show_model(self, shape: ModelShape) -> None:
        """Fill in the model's fields and hide those that it does not have."""
        self.base = shape
        self._set(**{name: getattr(shape, name) for name in SHAPE_FIELDS})
        if shape.moe:
            self._set(**{name: getattr(shape.moe, name) for name in MOE_FIELDS})
        for name in MOE_FIELDS:
            self.controls[name].layout.display = None if shape.moe else "none"
        self.controls["num_kv_heads"].disabled = shape.mla is not None

    def _changed(self, name: str, change: Any) -> None:
        if self._filling:  # a preset fills in a dozen fields: none of them answers by itself
            return
        self._filling = True
        try:
            if name == "preset" and change["new"] != _CUSTOM:
                self._set(config_path="")
                self._take_shape(preset(change["new"]))
            elif name == "config_path":
                self._take_config(change["new"])
            elif name in (*SHAPE_FIELDS, *MOE_FIELDS):
                self._take_field(name, change["new"])
        finally:
            self._filling = False
        self._redraw()

    def _take_field(self, name: str, value: Any) -> None:
        """The model is none of the presets any more, nor what the file says."""
        self._set(preset=_CUSTOM, config_path="")
        if _ALERT in self.note.value:
            self.note.value = ""
        if name == "num_heads" and self.base.mla is not None:
            self._set(num_kv_heads=value)

    def _take_config(self, path: str) -> None:
        if not path.strip():
            self.note.value = ""
            return
        try:
            shape, ignored = read_config(Path(path.strip()).expanduser())
        except (ValueError, RuntimeError) as error:  # the latter: nobody's home
            self.note.value = f"<span {_ALERT}>Not read: {escape(str(error))}</span>"
            return
        self._set(preset=_CUSTOM)
        unknown = f" Fields not known, left out: {', '.join(ignored)}." if ignored else ""
        self._take_shape(shape, f"Read {path.strip()}.{unknown}")

    def _take_shape(self, shape: ModelShape, note: str = "") -> None:
        """Show another model, with the attention it is trained with and no more tokens than it
        has positions for."""
        self._show_model(shape)
        self._set(attention=default_attention(shape))
        longest = longest_seq_len(shape)
        if longest is not None and self.controls["seq_len"].value > longest:
            self._set(seq_len=longest)
            note += f" Sequence set to {longest:,}: the model has no more positions."
        self.note.value = escape(note.strip())

    def _redraw(self) -> None:
        name = self.controls["gpu"].value
        gpu = None if name is None else find_gpu(name)
        try:
            page = explorer_page(train(self.base, **self.values()), gpu)
        except ValueError as error:
            page = refusal(str(error))
        self.result.value = with_labels(page)


def _control(name: str, offer: Any) -> Any:
    """The control for what is offered: a menu for a list, a slider for a range or for a tuple of
    powers of two, a number for its smallest value, a box for a bool, a text for its hint."""
    import ipywidgets

    look: dict[str, Any] = {
        "description": _LABELS[name],
        "tooltip": _HINTS.get(name, _LABELS[name]),
        "style": {"description_width": "130px"},
        "layout": {"width": "290px"},
    }
    match offer:
        case list():
            return ipywidgets.Dropdown(options=offer, **look)
        case tuple():
            return ipywidgets.SelectionSlider(options=offer, **look)
        case range():
            return ipywidgets.IntSlider(offer[0], offer[0], offer[-1], **look)
        case bool():
            return ipywidgets.Checkbox(offer, indent=True, **look)
        case int():
            return ipywidgets.BoundedIntText(max(offer, 1), min=offer, max=10**9, **look)
        case _:
            return ipywidgets.Text(placeholder=offer, continuous_update=False, **look)
