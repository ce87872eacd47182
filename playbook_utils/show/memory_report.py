"""What the memory explorer shows under its controls, as HTML: bars, numbers, remarks, or why not.

    explorer_html(MemorySettings(preset("llama-3-8b")), gpu("h100-sxm"))

The sheet is white with dark text, as figures are, so that it reads the same on a dark page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

from playbook_utils.predict.book_widget import WIDGET_FAULTS, widget_memory
from playbook_utils.predict.estimate import CATEGORIES, MOMENTS, MemoryEstimate
from playbook_utils.predict.hardware import Accelerator
from playbook_utils.predict.headroom import NOT_COUNTED, gib_text, verdict
from playbook_utils.show.memory_bars import FOR_A_MOMENT, explorer_svg
from playbook_utils.show.memory_controls import LABELS
from playbook_utils.show.memory_settings import MemorySettings, explore_memory
from playbook_utils.show.style import INK

__all__ = ["DIFFERENCES", "book_widget", "explorer_html", "with_labels"]

_SHEET = f"background:white;color:{INK};max-width:900px;box-sizing:border-box;line-height:1.5"
DIFFERENCES = (
    f'<details style="{_SHEET};padding:8px 10px">'
    "<summary>What differs from the book's widget</summary><ul>"
    + "".join(
        f"<li>The book's: {escape(fault)}. Here: {escape(here)}.</li>"
        for fault, here in WIDGET_FAULTS
    )
    + "</ul></details>"
)
"""A folded list, as HTML."""


def explorer_html(settings: MemorySettings, gpu: Accelerator | None = None) -> str:
    """Whether it fits, bars and numbers of the fullest rank; for impossible settings the sentence
    that says why."""
    estimate = explore_memory(settings)
    if isinstance(estimate, str):
        inner = f"<b>No such training.</b> {escape(with_labels(estimate), quote=False)}."
        return f'<div style="{_SHEET};padding:8px 10px" role="alert">{inner}</div>'
    book = book_widget(settings)
    fits = ""
    if gpu is not None:
        sentence = escape(verdict(estimate, gpu))
        fits = _line(f"<b>{sentence[0].upper()}{sentence[1:]}.</b>")
    remarks = "".join(_line(line) for line in _remarks(settings, estimate, book))
    return (
        f'<div style="{_SHEET};padding:8px 0">{fits}{explorer_svg(estimate, gpu)}'
        f"{_table(estimate, book)}{remarks}</div>"
    )


def _line(inner: str) -> str:
    return f'<div style="padding:0 10px">{inner}</div>'


def with_labels(sentence: str) -> str:
    """A message of `predict` in the page's words: a field by the label of its control, quoted.

    Names that are words of their own (tp, schedule) stay: the labels hold them.
    """
    for name, label in LABELS.items():
        if "_" in name or name == "dim":
            sentence = re.sub(rf"\b(moe\.)?{name}\b", f'"{label}"', sentence)
    return sentence


def book_widget(settings: MemorySettings) -> dict[str, int] | None:
    """What the book's widget says for these settings; None where it has no such input.

    It has neither pipelines, contexts nor experts. Raises ValueError for impossible settings.
    """
    sizes = _book_sizes(settings, settings.recompute)
    if sizes is None:
        return None
    four = {name: sizes[name] for name in CATEGORIES}
    return {**four, "total": sum(four.values())}


def _book_sizes(settings: MemorySettings, recompute: str) -> dict[str, int] | None:
    shape, layout = settings.shape(), settings.parallel_layout()
    if shape.moe is not None or max(layout.pp, layout.cp, layout.ep) > 1:
        return None
    return widget_memory(
        dim=shape.dim,
        ff_dim=shape.ff_dim,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        seq_len=settings.seq_len,
        vocab_size=shape.vocab_size,
        microbatch_size=settings.microbatch_size,
        optimizer_multiplier=settings.optimizer_bytes,
        tp=layout.tp,
        dp=layout.dp,
        zero_stage=layout.zero_stage,
        mlp=shape.mlp,
        mixed=settings.recipe().activation_bytes == 2,
        sequence_parallel=layout.sequence_parallel,
        recompute=recompute,
    )


def _square_bytes(settings: MemorySettings) -> int:
    """The a s^2 b term in the book's number that flash attention does not keep."""
    kept, without = (_book_sizes(settings, how) for how in ("none", "selective"))
    if kept is None or without is None or settings.attention_used() != "flash":
        return 0
    return 0 if settings.recompute != "none" else kept["activations"] - without["activations"]


def _table(estimate: MemoryEstimate, book: dict[str, int] | None) -> str:
    """The four numbers, their sum and the peak, in bytes and GiB, beside those of the book's
    widget, which knows no peak."""
    right, left = (f"text-align:{side};padding:0 10px" for side in ("right", "left"))
    heads = ("", "bytes", "GiB", *(("the book's widget",) if book else ()))
    lines = ["<tr>" + "".join(f'<th scope="col" style="{right}">{head}</th>' for head in heads)]
    for name in (*CATEGORIES, "total", "transient", "peak"):
        size = getattr(estimate, f"{name}_bytes")
        cells = [f"{size:,}", gib_text(size)]
        if book:
            cells.append(gib_text(book[name]) if name in book else "")
        label = FOR_A_MOMENT if name == "transient" else name.replace("_", " ")
        lines.append(
            f'<tr data-name="{name}"><th scope="row" style="{left}">{label}</th>'
            + "".join(f'<td style="{right}">{cell}</td>' for cell in cells)
        )
    body = "".join(f"{line}</tr>" for line in lines)
    return f'<table style="font-variant-numeric:tabular-nums">{body}</table>'


def _remarks(
    settings: MemorySettings, estimate: MemoryEstimate, book: dict[str, int] | None
) -> Iterator[str]:
    """Sentences, as HTML."""
    shape, layout = settings.shape(), settings.parallel_layout()
    if square := _square_bytes(settings):
        yield (
            f"Of the difference in activations from the book's widget, {gib_text(square)} is the "
            "a s² term, which flash attention does not keep."
        )
    if book is None:
        yield "The book's widget has no pipelines, split contexts or experts."
    if estimate.transient_bytes:
        yield f"For a moment: {escape(MOMENTS[estimate.moment])}."
    yield f"Bytes a parameter: {_recipe_in_words(settings)}."
    yield (
        f"Model: {shape.num_params:,} parameters. Ranks: {layout.world_size:,}. "
        f"{_rank_params(settings, estimate)}"
    )
    if layout.pp > 1:
        kept = ", ".join(map(str, estimate.microbatches_in_flight))
        yield (
            f"It is of pipeline stage {estimate.stage} of 0 to {layout.pp - 1}, which needs most. "
            f"Micro-batches kept at the peak: {kept}."
        )
    if estimate.gathered_bytes:
        gathered = gib_text(estimate.gathered_bytes)
        yield (
            f"ZeRO-3 gathers up to {gathered} for a moment: not in the total, and in the peak only "
            "if that moment is the worst."
        )
    for note in layout.notes(shape, settings.seq_len):
        yield f"Note: {escape(with_labels(note), quote=False)}."
    yield f"Not counted: {escape(NOT_COUNTED)}."


def _recipe_in_words(settings: MemorySettings) -> str:
    """ "2 weights + 2 gradients + 4 master copy + 8 moments = 16"."""
    recipe = settings.recipe()
    sizes = {
        "weights": recipe.params_bytes,
        "gradients": recipe.grads_bytes,
        "FP32 gradients": recipe.fp32_grads_bytes,
        "master copy": recipe.master_bytes,
        "moments": recipe.moments_bytes,
    }
    terms = " + ".join(f"{size} {name}" for name, size in sizes.items() if size)
    return f"{terms} = {recipe.bytes_per_param}"


def _rank_params(settings: MemorySettings, estimate: MemoryEstimate) -> str:
    each = settings.recipe().params_bytes
    kept = estimate.params_bytes // each
    if kept == estimate.num_params:
        return f"This rank: {kept:,} parameters."
    return (
        f"This rank computes with {estimate.num_params:,} parameters and, by ZeRO-3, keeps "
        f"{kept:,} of them."
    )
