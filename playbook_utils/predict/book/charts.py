"""The book's memory charts, as numbers and as formulas: each bar reproduced exactly.

    for row in chart("tp_memoryusage"):
        assert predict_chart_row(row.chart, row.panel, row.seq_len) == row

The charts add up memory by two conventions (`CONVENTIONS`), neither of which is what the book's
text says, nor what training Llama takes:
    "gpt-fp32"    Llama's sizes put into GPT-2's block: N = h v + s h + L (12 h^2 + 13 h) + 2 h,
                  with the positions that the text leaves out, 4 + 4 + 8 bytes each (FP32), beside
                  activations in half precision: s b h L (34 + 5 a s / h), and s b h for the mask
                  of the embedding's dropout.
    "llama-bf16"  Llama's own parameters without the norms, 2 + 2 + 8 bytes each (BF16 and Adam, no
                  master copy), activations 34 s b h L: GPT-2's block under selective
                  recomputation.
In two charts of the latter the parameters were rounded first (`ROUNDED_PARAMS_GIB`). Charts are
labelled GB; the numbers are GiB. Here they follow from `ModelShape`, `layer_terms`,
`params_on_rank` and `ParallelLayout`; only the conventions are typed in.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

from playbook_utils.predict.activations import layer_terms, output_terms
from playbook_utils.predict.book.widget import widget_shape
from playbook_utils.predict.layout import ParallelLayout
from playbook_utils.predict.precision import recipe
from playbook_utils.predict.presets import preset
from playbook_utils.predict.shapes import ModelShape
from playbook_utils.predict.stages import layers_of, peak_in_flight
from playbook_utils.predict.weights import params_on_rank

__all__ = [
    "BOOK_MODELS", "CHARTS", "CONVENTIONS", "ROUNDED_PARAMS_GIB", "ChartRow", "Convention",
    "book_facts", "book_params", "chart", "gpt_shape", "predict_chart_row",
]  # fmt: skip

_GIB = 2**30


@dataclass(frozen=True)
class Convention:
    """What a chart adds up."""

    name: str
    gpt_params: bool
    """Parameters of GPT-2's block; else Llama's own, without norms."""
    precision: str
    """Recipe for the bytes per parameter."""
    recompute: str
    """Where the chart does not say."""
    embedding_mask: bool
    """Count the mask of the embedding's dropout (s b h bytes)."""
    activation_bytes: int = 2


CONVENTIONS: dict[str, Convention] = {
    "gpt-fp32": Convention("gpt-fp32", True, "fp32", "none", True),
    "llama-bf16": Convention("llama-bf16", False, "bf16-no-master", "selective", False),
}

BOOK_MODELS: dict[str, str] = {
    "1B": "llama-3.2-1b",
    "3B": "llama-3.2-3b",
    "8B": "llama-3-8b",
    "70B": "llama-3-70b",
    "405B": "llama-3-405b",
}
"""The charts' names for the presets whose sizes they use."""

CHARTS: dict[str, tuple[str, str | None]] = {
    "memusage_activations": ("gpt-fp32", None),
    "memory_recomputation": ("gpt-fp32", None),
    "dp_ourjourney_memoryusage": ("llama-bf16", None),
    "zero3_memoryusage": ("llama-bf16", "8B"),
    "tp_memoryusage": ("llama-bf16", "70B"),
    "tp_sp_memoryusage": ("llama-bf16", "70B"),
    "cp_8Bmemoryusage": ("llama-bf16", "8B"),
    "pp_memoryusage": ("llama-bf16", "8B"),
}
"""Convention and model of each chart (None: the panel names the model)."""

ROUNDED_PARAMS_GIB: dict[str, float] = {
    "zero3_memoryusage": 15.0,  # 14.957
    "tp_memoryusage": 131.5,  # 131.414
    "tp_sp_memoryusage": 131.5,
}
"""GiB of parameters that these charts start from, before they divide."""


@dataclass(frozen=True)
class ChartRow:
    """One bar: a chart's panel at one sequence length, micro-batch size 1, GiB per rank."""

    chart: str
    panel: str
    """As printed: "8B", "TP=8+SP", "DP=8 ZeRO-1"."""
    recompute: str
    seq_len: int
    params_gib: float
    grads_gib: float
    optimizer_states_gib: float
    activations_gib: float
    total_gib: float


def book_facts() -> dict[str, Any]:
    """What `facts/book_charts.json` holds: the charts, the memory profile of the first four steps,
    the table of bytes per parameter, the widget's presets; copied from the book, source named."""
    path = resources.files(__package__).joinpath("facts", "book_charts.json")
    facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return facts


def chart(name: str) -> tuple[ChartRow, ...]:
    """The bars of one chart, as the book draws them; ValueError for a name not in `CHARTS`."""
    convention, _ = _chart(name)
    found = book_facts()["charts"][name]
    same: dict[str, Any] = {"chart": name, "recompute": convention.recompute}
    rows = (dict(zip(found["columns"], row, strict=True)) for row in found["rows"])
    return tuple(ChartRow(**(same | row)) for row in rows)


def book_params(dim: int, num_layers: int, vocab_size: int, seq_len: int = 0) -> int:
    """N = h v + L (12 h^2 + 13 h) + 2 h ("Memory for weights, gradients and optimizer states"):
    a GPT-2 with a tied head; `seq_len` adds the s h of its learned positions."""
    return (vocab_size + seq_len) * dim + num_layers * (12 * dim**2 + 13 * dim) + 2 * dim


def gpt_shape(shape: ModelShape, seq_len: int) -> ModelShape:
    """A GPT-2 of the same dim, layers, heads and vocabulary, with `seq_len` positions."""
    return widget_shape(
        dim=shape.dim,
        ff_dim=4 * shape.dim,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        seq_len=seq_len,
        vocab_size=shape.vocab_size,
    )


def predict_chart_row(
    name: str, panel: str, seq_len: int, recompute: str | None = None
) -> ChartRow:
    """The bar that the chart's convention gives; equal to the book's, for every bar it has.

    Args:
        name: one of `CHARTS`.
        panel: as in `ChartRow`; also one that the chart does not have ("TP=4").
        recompute: None is the chart's own mode.
    """
    convention, model = _chart(name)
    recompute = convention.recompute if recompute is None else recompute
    shape = _model(panel) if model is None else preset(BOOK_MODELS[model])
    layout = ParallelLayout() if model is None else _layout(panel)
    each = recipe(convention.precision)
    params, ways = _params(convention, shape, seq_len, layout, ROUNDED_PARAMS_GIB.get(name))
    sizes = {
        "params_gib": params * each.params_bytes / ways[2],
        "grads_gib": params * each.all_grads_bytes / ways[1],
        "optimizer_states_gib": params * each.optimizer_states_bytes / ways[0],
        "activations_gib": _activations(convention, shape, seq_len, layout, recompute) / _GIB,
    }
    return ChartRow(name, panel, recompute, seq_len, **sizes, total_gib=sum(sizes.values()))


def _params(
    convention: Convention,
    shape: ModelShape,
    seq_len: int,
    layout: ParallelLayout,
    rounded_gib: float | None,
) -> tuple[float, tuple[int, int, int]]:
    """Parameters on a rank of the first stage over 2^30, and ZeRO's ways to split optimizer
    states, gradients and params."""
    if convention.gpt_params:
        count: float = gpt_shape(shape, seq_len).num_params / _GIB
    elif rounded_gib is not None:
        count = rounded_gib / recipe(convention.precision).params_bytes / layout.tp
    else:
        on_rank = params_on_rank(shape, layout, stage=0)
        count = (sum(on_rank.values()) - on_rank["norms"]) / _GIB
    first, second, third = (
        layout.replicas if layout.zero_stage >= stage else 1 for stage in (1, 2, 3)
    )
    return count, (first, second, third)


def _activations(
    convention: Convention, shape: ModelShape, seq_len: int, layout: ParallelLayout, recompute: str
) -> int:
    gpt, size = gpt_shape(shape, seq_len), convention.activation_bytes
    terms = layer_terms(gpt, seq_len, element_bytes=size, recompute=recompute)
    layer = sum(term.bytes_on_rank(layout) for term in terms)
    layers = sum(len(part) for part in layers_of(gpt.num_layers, layout, stage=0))
    (in_flight,) = peak_in_flight(layout, 0, [layer])
    mask = sum(
        term.bytes_on_rank(layout)
        for term in output_terms(gpt, seq_len, element_bytes=size)
        if term.part == "embedding" and convention.embedding_mask
    )
    return in_flight * (layers * layer + mask)


def _chart(name: str) -> tuple[Convention, str | None]:
    if name not in CHARTS:
        raise ValueError(f"no chart is called {name!r}; expected one of {', '.join(CHARTS)}")
    convention, model = CHARTS[name]
    return CONVENTIONS[convention], model


def _model(panel: str) -> ModelShape:
    size = panel.rsplit("-", 1)[-1]
    if size not in BOOK_MODELS:
        raise ValueError(f"panel is {panel!r}; expected one of {', '.join(BOOK_MODELS)}")
    return preset(BOOK_MODELS[size])


def _layout(panel: str) -> ParallelLayout:
    """ "TP=2 CP=4", "DP=8 ZeRO-1" and "TP=8+SP" are layouts."""
    degrees: dict[str, Any] = {}
    for piece in re.split(r"[ +]", panel):
        if match := re.fullmatch(r"(DP|TP|CP|PP)=(\d+)", piece):
            name, value = match[1].lower(), int(match[2])
        elif match := re.fullmatch(r"ZeRO-([0-3])", piece):
            name, value = "zero_stage", int(match[1])
        elif piece == "SP":
            name, value = "sequence_parallel", True
        else:
            raise ValueError(
                f'panel is {panel!r}; expected degrees such as "TP=8", with "+SP" or "ZeRO-1"'
            )
        if name in degrees:
            raise ValueError(f"panel is {panel!r}; expected each degree once, found {name} twice")
        degrees[name] = value
    return ParallelLayout(**degrees)
