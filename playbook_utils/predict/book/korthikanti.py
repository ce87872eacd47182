"""Figure 7 of Korthikanti et al. 2022 (arXiv:2205.05198): what sequence parallelism, selective and
full recomputation leave of the activation memory, predicted from the terms of a layer.

    for row in figure_7():
        predict_percent(row) / row.percent        # within 1.1 % of 1

The figure's percentages are of the memory with tensor parallelism alone (tp = 8), for GPT models of
22B to 1T parameters. Predicted from one layer: micro-batches in flight, and layers, cancel. Left
out, there and here: the embedding's mask and the logits. The bars were read off the figure in steps
of 0.18 percentage points, which is 2 % of the smallest ones: two of these (9.52 predicted, 9.42
read) are the only ones beyond 1 %.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

from playbook_utils.predict.activations import layer_terms
from playbook_utils.predict.layout import ParallelLayout
from playbook_utils.predict.presets import gpt_style
from playbook_utils.predict.shapes import ModelShape

__all__ = ["Figure7Row", "figure_7", "predict_percent"]


@dataclass(frozen=True)
class Figure7Row:
    """One bar of the figure."""

    model: str
    """As printed: "22B"."""
    shape: ModelShape
    seq_len: int
    microbatch_size: int
    tp: int
    sequence_parallel: bool
    recompute: str
    percent: float
    """Of the activation memory with neither."""


def figure_7() -> tuple[Figure7Row, ...]:
    """The 20 bars of the figure, source in `facts/korthikanti_figure_7.json`."""
    path = resources.files(__package__).joinpath("facts", "korthikanti_figure_7.json")
    facts = json.loads(path.read_text(encoding="utf-8"))
    shapes = {name: _gpt(name, sizes) for name, sizes in facts["models"].items()}
    return tuple(
        Figure7Row(
            model,
            shapes[model],
            facts["models"][model]["seq_len"],
            facts["models"][model]["microbatch_size"],
            facts["models"][model]["tp"],
            sequence_parallel,
            recompute,
            percent,
        )
        for model, sequence_parallel, recompute, percent in facts["rows"]
    )


def predict_percent(row: Figure7Row) -> float:
    """The same by formula: one layer's bytes on a rank, over those with tp alone (eqs. 2 to 4)."""
    return 100 * _layer_bytes(row, row.sequence_parallel, row.recompute) / _layer_bytes(row)


def _layer_bytes(row: Figure7Row, sequence_parallel: bool = False, recompute: str = "none") -> int:
    layout = ParallelLayout(tp=row.tp, sequence_parallel=sequence_parallel)
    terms = layer_terms(row.shape, row.seq_len, row.microbatch_size, recompute=recompute)
    return sum(term.bytes_on_rank(layout) for term in terms)


def _gpt(name: str, sizes: dict[str, int]) -> ModelShape:
    return gpt_style(
        name=name,
        vocab_size=sizes["vocab_size"],
        dim=sizes["dim"],
        num_layers=sizes["num_layers"],
        num_heads=sizes["num_heads"],
        max_seq_len=sizes["seq_len"],
    )
