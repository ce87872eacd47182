"""What the memory explorer shows under its controls, as HTML: bars, numbers, remarks, or why not.

    explorer_html(MemorySettings(preset("llama-3-8b")), gpu("h100-sxm"))

The sheet is white with dark text, as figures are, so that it reads the same on a dark page.
"""

from __future__ import annotations

from html import escape

from playbook_utils.predict.book_widget import WIDGET_FAULTS, widget_memory
from playbook_utils.predict.hardware import Accelerator
from playbook_utils.predict.headroom import NOT_COUNTED, gib_text, verdict
from playbook_utils.predict.memory import CATEGORIES, MemoryEstimate
from playbook_utils.show.memory_bars import explorer_svg
from playbook_utils.show.memory_settings import MemorySettings, explore_memory
from playbook_utils.show.style import INK

__all__ = ["DIFFERENCES", "book_widget", "explorer_html"]

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
    """Bars and numbers of the fullest rank; for impossible settings the sentence that says why."""
    estimate = explore_memory(settings)
    if isinstance(estimate, str):
        inner = f"<b>No such training.</b> {escape(estimate)}."
        return f'<div style="{_SHEET};padding:8px 10px" role="alert">{inner}</div>'
    book = book_widget(settings)
    remarks = "".join(
        f'<div style="padding:0 10px">{line}</div>'
        for line in _remarks(settings, estimate, gpu, book)
    )
    return (
        f'<div style="{_SHEET};padding:8px 0">{explorer_svg(estimate, gpu)}'
        f"{_table(estimate, book)}{remarks}</div>"
    )


def book_widget(settings: MemorySettings) -> dict[str, int] | None:
    """What the book's widget says for these settings; None where it has no such input.

    It has neither pipelines, contexts nor experts. Raises ValueError for impossible settings.
    """
    shape, layout = settings.shape(), settings.parallel_layout()
    if shape.moe is not None or max(layout.pp, layout.cp, layout.ep) > 1:
        return None
    sizes = widget_memory(
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
        recompute=settings.recompute,
    )
    four = {name: sizes[name] for name in CATEGORIES}
    return {**four, "total": sum(four.values())}


def _table(estimate: MemoryEstimate, book: dict[str, int] | None) -> str:
    """The four numbers and their sum, in bytes and GiB, beside those of the book's widget."""
    right, left = (f"text-align:{side};padding:0 10px" for side in ("right", "left"))
    heads = ("", "bytes", "GiB", *(("the book's widget",) if book else ()))
    lines = ["<tr>" + "".join(f'<th scope="col" style="{right}">{head}</th>' for head in heads)]
    for name in (*CATEGORIES, "total"):
        size = getattr(estimate, f"{name}_bytes")
        cells = [f"{size:,}", gib_text(size), *([gib_text(book[name])] if book else [])]
        lines.append(
            f'<tr data-name="{name}"><th scope="row" style="{left}">{name.replace("_", " ")}</th>'
            + "".join(f'<td style="{right}">{cell}</td>' for cell in cells)
        )
    body = "".join(f"{line}</tr>" for line in lines)
    return f'<table style="font-variant-numeric:tabular-nums">{body}</table>'


def _remarks(
    settings: MemorySettings,
    estimate: MemoryEstimate,
    gpu: Accelerator | None,
    book: dict[str, int] | None,
) -> list[str]:
    """Sentences, as HTML."""
    shape, layout = settings.shape(), settings.parallel_layout()
    lines = []
    if gpu is not None:
        sentence = escape(verdict(estimate, gpu))
        lines.append(f"<b>{sentence[0].upper()}{sentence[1:]}.</b>")
    lines.append(
        f"Model: {shape.num_params:,} parameters. Ranks: {layout.world_size:,}. "
        f"This rank: {estimate.num_params:,} parameters."
    )
    if layout.pp > 1:
        kept = ", ".join(map(str, estimate.microbatches_in_flight))
        lines.append(
            f"It is of pipeline stage {estimate.stage} of 0 to {layout.pp - 1}, which needs most. "
            f"Micro-batches kept at the peak: {kept}."
        )
    if estimate.gathered_bytes:
        gathered = gib_text(estimate.gathered_bytes)
        lines.append(f"ZeRO-3 gathers up to {gathered} more for a moment, not in the total.")
    lines += [f"Note: {escape(note)}." for note in layout.notes(shape, settings.seq_len)]
    lines.append(f"Not counted: {escape(NOT_COUNTED)}.")
    if book is None:
        lines.append("The book's widget has no pipelines, split contexts or experts.")
    return lines
