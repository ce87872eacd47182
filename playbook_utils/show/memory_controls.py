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

__all__ = ["CUSTOM", "make_controls", "set_value"]

CUSTOM = "custom"
"""What the preset menu says once a field of the model was changed."""

_LARGEST = 10**9
_MLPS = (("SwiGLU", "swiglu"), ("GELU", "gelu"), ("ReLU", "relu"))
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "Model": (
        *("preset", "config_path", "num_layers", "num_heads", "num_kv_heads", "dim", "ff_dim"),
        *("vocab_size", "mlp", "num_experts", "experts_per_token", "expert_ff_dim"),
        *("tied", "dropout"),
    ),
    "Training": (
        *("seq_len", "microbatch_size", "precision", "optimizer_bytes", "recompute", "attention"),
        "gpu",
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
            layout={"width": "330px", "overflow": "hidden"},
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
            **_described("config.json"), placeholder="its path, then Enter", continuous_update=False
        ),
        "num_layers": _number("layers L"),
        "num_heads": _number("heads a"),
        "num_kv_heads": _number("kv heads (GQA)"),
        "dim": _number("hidden h"),
        "ff_dim": _number("feed-forward h_ff"),
        "vocab_size": _number("vocabulary v"),
        "mlp": _menu("FF activation", _MLPS),
        "num_experts": _number("experts"),
        "experts_per_token": _number("experts a token"),
        "expert_ff_dim": _number("width of an expert"),
        "tied": _box("tied head"),
        "dropout": _box("dropout"),
    }


def _training_controls() -> dict[str, Any]:
    import ipywidgets

    return {
        "seq_len": _powers("sequence s", 20, first=7),
        "microbatch_size": ipywidgets.IntSlider(1, 1, 64, **_described("micro-batch b")),
        "precision": _menu(
            "precision", [(f"{name} ({r.bytes_per_param} B)", name) for name, r in RECIPES.items()]
        ),
        "optimizer_bytes": _number("optimizer bytes k", smallest=0),
        "recompute": _menu("recomputation", RECOMPUTE),
        "attention": _menu("attention", ("flash", "unfused")),
        "gpu": _menu(
            "GPU",
            [("none", None)]
            + [(f"{name} ({bytes_text(gpu.memory_bytes)})", name) for name, gpu in GPUS.items()],
        ),
    }


def _parallel_controls() -> dict[str, Any]:
    import ipywidgets

    return {
        "dp": _powers("data dp", 12),
        "tp": _powers("tensor tp (t)", 6),
        "sequence_parallel": _box("sequence parallelism"),
        "cp": _powers("context cp", 8),
        "pp": ipywidgets.IntSlider(1, 1, 64, **_described("pipeline pp")),
        "schedule": _menu("schedule", SCHEDULES),
        "virtual_stages": ipywidgets.IntSlider(1, 1, 8, **_described("stages a rank")),
        "num_microbatches": _number("micro-batches (0: fill)", smallest=0),
        "ep": _powers("expert ep", 8),
        "zero_stage": ipywidgets.IntSlider(0, 0, 3, **_described("ZeRO stage")),
    }


def _described(description: str) -> dict[str, Any]:
    return {
        "description": description,
        "style": {"description_width": "140px"},
        "layout": {"width": "315px"},
    }


def _menu(description: str, options: Sequence[Any]) -> Any:
    import ipywidgets

    return ipywidgets.Dropdown(options=options, **_described(description))


def _number(description: str, smallest: int = 1) -> Any:
    import ipywidgets

    return ipywidgets.BoundedIntText(
        max(smallest, 1), min=smallest, max=_LARGEST, **_described(description)
    )


def _powers(description: str, last: int, first: int = 0) -> Any:
    """A slider over the powers of two."""
    import ipywidgets

    options = [2**power for power in range(first, last + 1)]
    return ipywidgets.SelectionSlider(options=options, **_described(description))


def _box(description: str) -> Any:
    import ipywidgets

    return ipywidgets.Checkbox(False, **_described(description), indent=True)
