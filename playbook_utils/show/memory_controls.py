"""The memory explorer's controls: what they are called, what they offer, how they are grouped.

Left out: what they do when moved, which is `memory_explorer`'s.

    controls, groups = make_controls()
    set_value(controls["tp"], 8)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from playbook_utils.predict.activations import RECOMPUTE
from playbook_utils.predict.hardware import GPUS
from playbook_utils.predict.layout import SCHEDULES
from playbook_utils.predict.precision import RECIPES
from playbook_utils.predict.presets import PRESETS
from playbook_utils.show.units import bytes_text

__all__ = ["CUSTOM", "LABELS", "make_controls", "set_value"]

CUSTOM = "custom"
"""What the preset menu says once a field of the model was changed."""

LABELS: Mapping[str, str] = {
    "preset": "preset",
    "config_path": "config.json",
    "num_layers": "layers L",
    "num_heads": "heads a",
    "num_kv_heads": "kv heads (GQA)",
    "dim": "hidden h",
    "ff_dim": "feed-forward h_ff",
    "vocab_size": "vocabulary v",
    "mlp": "FF activation",
    "num_experts": "experts",
    "experts_per_token": "experts a token",
    "expert_ff_dim": "width of an expert",
    "tied": "tied head",
    "dropout": "dropout",
    "seq_len": "sequence s",
    "microbatch_size": "micro-batch b",
    "precision": "precision",
    "optimizer_bytes": "Adam moments (B)",
    "recompute": "recomputation",
    "attention": "attention",
    "gpu": "GPU",
    "dp": "data dp",
    "tp": "tensor tp (t)",
    "sequence_parallel": "sequence parallel",
    "cp": "context cp",
    "pp": "pipeline pp",
    "schedule": "schedule",
    "virtual_stages": "stages a rank",
    "num_microbatches": "micro-batches/step",
    "ep": "expert ep",
    "zero_stage": "ZeRO stage",
}
"""What each control is called on the page."""

_HINTS = {
    "optimizer_bytes": "bytes a parameter of Adam's two moments, beside the precision's others",
    "num_microbatches": "0: as many as fill the pipeline",
    "virtual_stages": "with the interleaved schedule: 2 or more",
}
"""Shown while the mouse rests on a control."""

_LARGEST = 10**9
_MLPS = (("SwiGLU", "swiglu"), ("GELU", "gelu"), ("ReLU", "relu"))
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "Model": (
        *("preset", "config_path", "num_layers", "num_heads", "num_kv_heads", "dim", "ff_dim"),
        *("vocab_size", "mlp", "num_experts", "experts_per_token", "expert_ff_dim"),
        "tied",
    ),
    "Training": (
        *("seq_len", "microbatch_size", "precision", "optimizer_bytes", "recompute", "attention"),
        *("dropout", "gpu"),
    ),
    "Parallelism": (
        *("dp", "tp", "sequence_parallel", "cp", "pp", "schedule", "virtual_stages"),
        *("num_microbatches", "ep", "zero_stage"),
    ),
}


def make_controls() -> tuple[dict[str, Any], Any]:
    """The controls by name, and one widget that shows them in three groups."""
    import ipywidgets

    controls = {**_model_controls(), **_training_controls(), **_parallel_controls()}
    columns = [
        ipywidgets.VBox(
            [ipywidgets.HTML(f"<b>{title}</b>"), *(controls[name] for name in names)],
            layout={"width": "300px", "overflow": "hidden"},
        )
        for title, names in _GROUPS.items()
    ]
    return controls, ipywidgets.HBox(columns, layout={"flex_flow": "row wrap"})


def set_value(control: Any, value: Any) -> None:
    """Set a control, and widen what it offers where `value` is beyond that."""
    options = getattr(control, "options", None)
    if type(value) is int and options and value not in options:  # a slider over powers of two
        control.options = tuple(sorted({*options, value}))
    elif hasattr(control, "max") and value > control.max:
        control.max = value
    control.value = value


def _model_controls() -> dict[str, Any]:
    import ipywidgets

    return {
        "preset": _menu("preset", [CUSTOM, *PRESETS]),
        "config_path": ipywidgets.Text(
            **_described("config_path"), placeholder="its path, then Enter", continuous_update=False
        ),
        "num_layers": _number("num_layers"),
        "num_heads": _number("num_heads"),
        "num_kv_heads": _number("num_kv_heads"),
        "dim": _number("dim"),
        "ff_dim": _number("ff_dim"),
        "vocab_size": _number("vocab_size"),
        "mlp": _menu("mlp", _MLPS),
        "num_experts": _number("num_experts"),
        "experts_per_token": _number("experts_per_token"),
        "expert_ff_dim": _number("expert_ff_dim"),
        "tied": _box("tied"),
        "dropout": _box("dropout"),
    }


def _training_controls() -> dict[str, Any]:
    import ipywidgets

    return {
        "seq_len": _powers("seq_len", 20, first=7),
        "microbatch_size": ipywidgets.IntSlider(1, 1, 64, **_described("microbatch_size")),
        "precision": _menu("precision", list(RECIPES)),
        "optimizer_bytes": _number("optimizer_bytes", smallest=0),
        "recompute": _menu("recompute", RECOMPUTE),
        "attention": _menu("attention", ("flash", "unfused")),
        "gpu": _menu(
            "gpu",
            [("none", None)]
            + [(f"{name} ({bytes_text(gpu.memory_bytes)})", name) for name, gpu in GPUS.items()],
        ),
    }


def _parallel_controls() -> dict[str, Any]:
    import ipywidgets

    return {
        "dp": _powers("dp", 12),
        "tp": _powers("tp", 6),
        "sequence_parallel": _box("sequence_parallel"),
        "cp": _powers("cp", 8),
        "pp": ipywidgets.IntSlider(1, 1, 64, **_described("pp")),
        "schedule": _menu("schedule", SCHEDULES),
        "virtual_stages": ipywidgets.IntSlider(1, 1, 8, **_described("virtual_stages")),
        "num_microbatches": _number("num_microbatches", smallest=0),
        "ep": _powers("ep", 8),
        "zero_stage": ipywidgets.IntSlider(0, 0, 3, **_described("zero_stage")),
    }


def _described(name: str) -> dict[str, Any]:
    return {
        "description": LABELS[name],
        "tooltip": _HINTS.get(name, LABELS[name]),
        "style": {"description_width": "130px"},
        "layout": {"width": "290px"},
    }


def _menu(name: str, options: Sequence[Any]) -> Any:
    import ipywidgets

    return ipywidgets.Dropdown(options=options, **_described(name))


def _number(name: str, smallest: int = 1) -> Any:
    import ipywidgets

    return ipywidgets.BoundedIntText(
        max(smallest, 1), min=smallest, max=_LARGEST, **_described(name)
    )


def _powers(name: str, last: int, first: int = 0) -> Any:
    """A slider over the powers of two."""
    import ipywidgets

    options = [2**power for power in range(first, last + 1)]
    return ipywidgets.SelectionSlider(options=options, **_described(name))


def _box(name: str) -> Any:
    import ipywidgets

    return ipywidgets.Checkbox(False, **_described(name), indent=True)
