"""What the memory explorer shows: bars, numbers, remarks, or why not, as HTML.

    explorer_page(train(preset("llama-3-8b"), tp=8, seq_len=8192), gpu("h100-sxm"))

The browser lays it out: bars are boxes as wide as their share, texts wrap. The sheet is white with
dark text, as figures are, so that it reads the same on a dark page. Left out: the controls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape

from matplotlib.colors import to_hex, to_rgb

from playbook_utils.predict.book.widget import WIDGET_FAULTS, widget_on
from playbook_utils.predict.estimate import CATEGORIES, MemoryEstimate
from playbook_utils.predict.hardware import Accelerator
from playbook_utils.predict.headroom import gib_text, remarks, verdict
from playbook_utils.predict.training import Training
from playbook_utils.show.estimates import in_words, whole
from playbook_utils.show.style import CATEGORY_COLORS, INK, text_color_on
from playbook_utils.show.units import bytes_text

__all__ = ["DIFFERENCES", "explorer_page", "refusal"]

_SHEET = (
    f"background:white;color:{INK};max-width:900px;box-sizing:border-box;line-height:1.5;"
    "padding:8px 10px"
)
_SMALL = "font-size:11px;line-height:1.4"
_HATCHED = "repeating-linear-gradient(45deg,#8A8A8A 0 2px,white 2px 6px)"
_LEFT_PX, _BARS_PX = 150, 720
_FAR = 12  # a GPU that holds this many times the peak is told of, not drawn
DIFFERENCES = (
    f'<details style="{_SHEET}"><summary>What differs from the book\'s widget</summary><ul>'
    + "".join(
        f"<li>The book's: {escape(fault)}. Here: {escape(here)}.</li>"
        for fault, here in WIDGET_FAULTS
    )
    + "</ul></details>"
)
"""A folded list, as HTML."""


def explorer_page(training: Training, gpu: Accelerator | None = None) -> str:
    """Whether it fits, bars and numbers of the fullest rank, and remarks."""
    book = widget_on(training)
    sentence = "" if gpu is None else escape(verdict(training.estimate, gpu))
    fits = f"<b>{sentence[0].upper()}{sentence[1:]}.</b>" if sentence else ""
    lines = "".join(f"<div>{line}</div>" for line in _remarks(training, book))
    bars = _bars(training.estimate, gpu, book or {})
    return f'<div style="{_SHEET}">{fits}{bars}{lines}</div>'


def refusal(sentence: str) -> str:
    """What stands in place of the page where the settings are impossible."""
    inner = f"<b>No such training.</b> {escape(sentence, quote=False)}."
    return f'<div style="{_SHEET}" role="alert">{inner}</div>'


def _bars(estimate: MemoryEstimate, gpu: Accelerator | None, book: Mapping[str, int]) -> str:
    """A bar a category, split into parts with a number each, then all of them in the total.

    A dashed line is what the GPU holds; far beyond the bars it is told of instead.
    """
    holds = 0 if gpu is None else gpu.usable_bytes
    far = holds > _FAR * estimate.peak_bytes
    reach = max(estimate.peak_bytes, 0 if far else holds, 1)
    rows = ""
    for name, parts in estimate.parts.items():
        numbers = _number(name, sum(parts.values()), book)
        rows += _row(numbers, parts, _shades(name, len(parts)), reach)
    numbers = _number("total", estimate.total_bytes, book)
    if estimate.transient_bytes:
        numbers += _number("peak", estimate.peak_bytes, {})
    colors = [*(CATEGORY_COLORS[name] for name in CATEGORIES), _HATCHED]
    rows += _row(numbers, whole(estimate), colors, reach)
    limit = ""
    if gpu is not None:
        share = 0 if far else holds / reach
        line = (
            f'<div data-limit="{share:.5f}" style="position:absolute;top:24px;bottom:0;'
            f"left:calc({_LEFT_PX}px + (100% - {_LEFT_PX}px)*{share:.5f});"
            f'border-left:2px dashed {INK}"></div>'
        )
        label = f"{gpu.name} holds {bytes_text(holds)}"
        label += ", far to the right →" if far else ", the dashed line"
        limit = f'<div style="text-align:right">{label}</div>' + ("" if far else line)
    said = escape(f"Memory of one rank: {in_words(estimate, gpu)}")
    look = f"{_SMALL};position:relative;margin:6px 0"
    return f'<div role="img" aria-label="{said}" style="{look}">{limit}{rows}</div>'


def _number(name: str, size: int, book: Mapping[str, int]) -> str:
    """A size in GiB and bytes, and what the book's widget says in its place."""
    beside = f"<br>the book's: {_size(book[name])}" if name in book else ""
    return (
        f'<b style="font-size:14px">{name.replace("_", " ")}</b><br><span style="font-size:13px">'
        f'{_size(size)}</span><br><span data-name="{name}">{size:,} bytes</span>{beside}<br>'
    )


def _size(num_bytes: int) -> str:
    return gib_text(num_bytes) if num_bytes >= 2**30 else bytes_text(num_bytes)


def _row(numbers: str, parts: Mapping[str, int], colors: list[str], reach: int) -> str:
    """Numbers, the bar, and under it a line with a number for each part."""
    bar, legend = "", ""
    for (part, size), color in zip(parts.items(), colors, strict=False):
        words, share = part.replace("_", " "), size / reach
        fits = share * _BARS_PX > 7 * len(words) + 6 and color != _HATCHED
        bar += (
            f'<div data-part="{part}" title="{words}: {size:,} bytes" style="width:'
            f"{100 * share:.4f}%;background:{color};overflow:hidden;text-align:center;"
            f"color:{text_color_on(color) if fits else INK};box-sizing:border-box;border-right:"
            f'{int(share * _BARS_PX > 3)}px solid white">{words if fits else ""}</div>'
        )
        square = f"display:inline-block;width:9px;height:9px;margin-right:4px;background:{color}"
        legend += (
            f'<span style="{_SMALL};display:inline-block;margin-right:14px;background:white">'
            f'<span style="{square}"></span>{words} {bytes_text(size)}</span>'
        )
    return (
        f'<div style="display:flex;margin-bottom:8px"><div style="flex:0 0 {_LEFT_PX}px">{numbers}'
        '</div><div style="flex:1;min-width:0;position:relative"><div style="display:flex;'
        f'height:24px;line-height:24px">{bar}</div>{legend}</div></div>'
    )


def _shades(name: str, number: int) -> list[str]:
    """The category's colour, mixed with more and more white."""
    shares = [0.6 * i / max(number - 1, 2) for i in range(number)]
    rgb = to_rgb(CATEGORY_COLORS[name])
    mixed = [[part + (1 - part) * share for part in rgb] for share in shares]
    return [to_hex((red, green, blue)) for red, green, blue in mixed]


def _remarks(training: Training, book: dict[str, int] | None) -> Iterator[str]:
    """Sentences, as HTML."""
    shape, layout, estimate = training.shape, training.layout, training.estimate
    if book is None:
        yield "The book's widget has no pipelines, split contexts or experts."
    elif training.attention == "flash" and training.recompute == "none":
        without = widget_on(training, "selective") or book
        square = book["activations"] - without["activations"]
        yield (
            f"Of the difference in activations from the book's widget, {gib_text(square)} is what "
            "attention keeps of size a x s², and flash attention does not."
        )
    sizes = {
        "weights": training.recipe.params_bytes,
        "gradients": training.recipe.grads_bytes,
        "FP32 gradients": training.recipe.fp32_grads_bytes,
        "master copy": training.recipe.master_bytes,
        "moments": training.recipe.moments_bytes,
    }
    terms = " + ".join(f"{size} {name}" for name, size in sizes.items() if size)
    yield f"Bytes a parameter: {terms} = {training.recipe.bytes_per_param}."
    kept, own = training.kept_params, f"This rank: {training.kept_params:,} parameters."
    if kept != estimate.num_params:
        own = f"This rank computes with {estimate.num_params:,} parameters and, by ZeRO-3, keeps "
        own += f"{kept:,} of them."
    yield f"Model: {shape.num_params:,} parameters. Ranks: {layout.world_size:,}. {own}"
    if layout.pp > 1:
        in_flight = ", ".join(map(str, estimate.microbatches_in_flight))
        yield (
            f"It is of pipeline stage {estimate.stage} of 0 to {layout.pp - 1}, which needs most. "
            f"Micro-batches kept at the peak: {in_flight}."
        )
    for remark in remarks(estimate, layout.notes(shape, training.seq_len)):
        yield escape(remark, quote=False)
