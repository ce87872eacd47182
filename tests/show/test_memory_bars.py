"""The bars of a prediction: lengths, colours, numbers, and where the GPU's line stands."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations, product
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
from matplotlib.colors import to_hex

from playbook_utils import show
from playbook_utils.predict.estimate import CATEGORIES, MemoryEstimate
from playbook_utils.predict.hardware import gpu
from playbook_utils.predict.headroom import usable_bytes, verdict
from playbook_utils.predict.memory import predict_memory
from playbook_utils.predict.presets import preset
from playbook_utils.show.memory_bars import explorer_svg
from playbook_utils.show.memory_settings import MemorySettings, explore_memory
from playbook_utils.show.style import CATEGORY_COLORS
from playbook_utils.show.svg import HATCHED, text_width
from playbook_utils.show.units import bytes_text, bytes_unit
from tests.show.drawn import flaws

LLAMA = MemorySettings(preset("llama-3-8b"), attention="flash")
H100 = gpu("h100-sxm")
SVG = "{http://www.w3.org/2000/svg}"


def drawing(settings: MemorySettings, gpu_name: str | None = "h100-sxm") -> ElementTree.Element:
    estimate = explore_memory(settings)
    assert not isinstance(estimate, str), estimate
    return ElementTree.fromstring(explorer_svg(estimate, gpu(gpu_name) if gpu_name else None))


def text_boxes(root: ElementTree.Element) -> list[tuple[str, float, float, float, float]]:
    """(text, left, right, top, bottom) of each."""
    found = []
    for text in root.iter(f"{SVG}text"):
        size, x, y = (float(text.get(name, "")) for name in ("font-size", "x", "y"))
        assert text.text is not None
        width = text_width(text.text, size, bold=text.get("font-weight") == "bold")
        left = x - width * {None: 0, "middle": 0.5, "end": 1}[text.get("text-anchor")]
        found.append((text.text, left, left + width, y - 0.76 * size, y + 0.24 * size))
    return found


CASES = {
    "llama": LLAMA,
    "experts": MemorySettings(preset("deepseek-v3"), layout={"dp": 64, "ep": 64, "zero_stage": 3}),
    "tiny": MemorySettings(preset("course-tiny"), seq_len=128),
    "gpt": MemorySettings(preset("gpt-3-175b"), seq_len=2048, attention="unfused"),
    "pipeline": replace(LLAMA, layout={"pp": 4, "tp": 8}, recompute="full"),
    "long": replace(LLAMA, seq_len=2**20, microbatch_size=64),
}


class TestDrawing:
    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.parametrize("limit", ["h100-sxm", "t4", None])
    def test_no_text_overlaps_another_or_leaves_the_sheet(
        self, case: str, limit: str | None
    ) -> None:
        root = drawing(CASES[case], limit)
        _, _, width, height = map(float, root.get("viewBox", "").split())
        boxes = text_boxes(root)
        for (a, *x), (b, *y) in combinations(boxes, 2):
            beside = x[1] <= y[0] or y[1] <= x[0]
            assert beside or x[3] <= y[2] or y[3] <= x[2], f"{a!r} and {b!r} overlap"
        for text, left, right, top, bottom in boxes:
            assert left >= 0 and right <= width and top >= 0 and bottom <= height, text

    @pytest.mark.parametrize("case", CASES)
    def test_every_part_has_its_number(self, case: str) -> None:
        estimate = explore_memory(CASES[case])
        assert not isinstance(estimate, str)
        texts = {text for text, *_ in text_boxes(drawing(CASES[case]))}
        for name in CATEGORIES:
            size = getattr(estimate, f"{name}_bytes")
            assert (
                bytes_text(size) in texts
                and f"{name} {bytes_text(size)}".replace("_", " ") in texts
            )
            for part, part_size in estimate.parts[name].items():
                assert f"{part.replace('_', ' ')} {bytes_text(part_size)}" in texts
        assert bytes_text(estimate.total_bytes) in texts

    def test_the_line_stands_where_the_gpu_is_full(self) -> None:
        root = drawing(LLAMA)
        last = bars_of(root)[-1]
        scale = (last[-1].left - 160) / sum(bar.size for bar in last[:-1])
        assert limit_of(root) == pytest.approx(160 + usable_bytes(H100) * scale, abs=0.5)

    def test_a_limit_far_beyond_the_bars_is_told_of_instead_of_drawn(self) -> None:
        root = drawing(CASES["tiny"])
        assert not [one for one in root.iter(f"{SVG}line") if one.get("stroke-dasharray")]
        assert [text for text, *_ in text_boxes(root) if "79.6 GiB, far to the right" in text]

    def test_it_says_in_words_what_it_shows(self) -> None:
        description = drawing(LLAMA).findtext(f"{SVG}desc", "")
        assert "optimizer states 89.7 GiB" in description and "does not fit h100-sxm" in description
        peak = bytes_text(estimate_of(LLAMA).peak_bytes)
        assert f"total 139 GiB, at the peak {peak}. It does not fit" in description


class Bar(NamedTuple):
    name: str
    size: int
    left: float
    width: float
    fill: str


def estimate_of(settings: MemorySettings) -> MemoryEstimate:
    estimate = explore_memory(settings)
    assert not isinstance(estimate, str), estimate
    return estimate


def bars_of(root: ElementTree.Element) -> list[list[Bar]]:
    """The parts of each bar, from the left; parts say their size while the mouse is on them."""
    rows: dict[str, list[Bar]] = {}
    for rect in root.iter(f"{SVG}rect"):
        if hint := rect.findtext(f"{SVG}title"):
            match = re.fullmatch(r"(.+): ([\d,]+) bytes", hint)
            assert match, hint
            x, width = (float(rect.get(name, "")) for name in ("x", "width"))
            bar = Bar(match[1], int(match[2].replace(",", "")), x, width, rect.get("fill", ""))
            rows.setdefault(rect.get("y", ""), []).append(bar)
    return list(rows.values())


def limit_of(root: ElementTree.Element) -> float | None:
    """Where the dashed line stands."""
    lines = [line for line in root.iter(f"{SVG}line") if line.get("stroke-dasharray")]
    return float(lines[0].get("x1", "")) if lines else None


FAR_APART = [
    MemorySettings(preset(name), seq_len=seq_len, microbatch_size=b, layout={"dp": 8, **layout})
    for name, seq_len, b, layout in product(
        ("llama-3-8b", "llama-3.2-1b"),
        (1024, 8192),
        (1, 2),
        ({}, {"zero_stage": 1}, {"zero_stage": 3}, {"tp": 4, "pp": 2}),
    )
]


class TestPeak:
    def test_the_gpu_holds_the_rank_where_the_last_bar_ends_left_of_its_line(self) -> None:
        seen = []
        for settings, name in product(FAR_APART, ("h100-sxm", "a100-40gb", "l4", "t4")):
            estimate = estimate_of(settings)
            root = ElementTree.fromstring(explorer_svg(estimate, gpu(name)))
            fits = verdict(estimate, gpu(name)).startswith("fits")
            last, line = bars_of(root)[-1][-1], limit_of(root)
            if line is None:
                assert fits and estimate.peak_bytes * 12 < usable_bytes(gpu(name))
                continue
            assert fits == (last.left + last.width <= line), (settings, name)
            seen.append((fits, estimate.total_bytes <= usable_bytes(gpu(name))))
        # Also some whose total alone would fit.
        assert {(True, True), (False, False), (False, True)} == set(seen)

    def test_what_is_there_for_a_moment_is_hatched_at_the_end_of_the_total(self) -> None:
        estimate = estimate_of(LLAMA)
        assert estimate.transient_bytes > 0
        root = drawing(LLAMA)
        *whole, moment = bars_of(root)[-1]
        assert (moment.name, moment.size) == ("for a moment", estimate.transient_bytes)
        assert moment.fill == HATCHED and f'id="{HATCHED[5:-1]}"' in explorer_svg(estimate)
        assert sum(bar.size for bar in whole) == estimate.total_bytes
        texts = [text for text, *_ in text_boxes(root)]
        assert bytes_text(estimate.total_bytes) in texts
        assert f"peak {bytes_text(estimate.peak_bytes)}" in texts

    def test_a_rank_without_such_a_moment_has_no_peak_beside_its_total(self) -> None:
        estimate = replace(estimate_of(LLAMA), transient_bytes=0)
        svg = explorer_svg(estimate, H100)
        assert "peak" not in svg and "for a moment" not in svg


class TestBars:
    @pytest.mark.parametrize("case", ["llama", "experts", "tiny", "pipeline"])
    def test_each_part_starts_where_the_one_before_ends(self, case: str) -> None:
        estimate = estimate_of(CASES[case])
        limit = usable_bytes(H100)
        reach = max(estimate.peak_bytes, 0 if limit > 12 * estimate.peak_bytes else limit)
        scale = 720 / reach
        rows = bars_of(drawing(CASES[case]))
        assert [[bar.name for bar in row] for row in rows[:-1]] == [
            [part.replace("_", " ") for part in estimate.parts[name]] for name in CATEGORIES
        ]
        for row in rows:
            left = 160.0
            for bar in row:
                assert bar.left == pytest.approx(left, abs=0.06)
                assert bar.width == pytest.approx(max(bar.size * scale - 1, 0.6), abs=0.06)
                left += bar.size * scale

    @pytest.mark.parametrize("case", ["llama", "tiny", "long", "gpt"])
    def test_the_axis_says_what_the_bars_measure(self, case: str) -> None:
        root = drawing(CASES[case])
        last = bars_of(root)[-1]
        scale = (last[-1].left - 160) / sum(bar.size for bar in last[:-1])
        unit, name = bytes_unit(
            max(sum(bar.size for bar in last), usable_bytes(H100) * (limit_of(root) is not None))
        )
        axis = [t for t in root.iter(f"{SVG}text") if t.get("fill") == "#5F5F5F"]
        assert len(axis) >= 3 and axis[0].text == f"0 {name}"
        for label in axis:
            value = float((label.text or "").removesuffix(f" {name}"))
            assert float(label.get("x", "")) == pytest.approx(160 + value * unit * scale, abs=1)

    def test_colours_are_those_that_the_parts_have_everywhere(self) -> None:
        root = drawing(LLAMA)
        rows = bars_of(root)
        named = {name.replace("_", " "): color for name, color in CATEGORY_COLORS.items()}
        assert {bar.name: bar.fill for bar in rows[-1][:-1]} == {
            name.replace("_", " "): CATEGORY_COLORS[name] for name in CATEGORIES
        }
        for name, row in zip(CATEGORIES, rows, strict=False):
            assert row[0].fill == named[name.replace("_", " ")].lower()

    def test_squares_of_the_legend_have_their_bars_colour(self) -> None:
        root = drawing(LLAMA)
        squares = [r.get("fill") for r in root.findall(f"{SVG}rect") if r.get("height") == "9.0"]
        assert squares == [bar.fill for row in bars_of(root) for bar in row]


class TestMemoryBars:
    def test_memory_bars_says_its_numbers_in_words_and_draws_them(self) -> None:
        shape = preset("llama-3-8b")
        estimates = {
            mode: predict_memory(shape, seq_len=16384, recompute=mode) for mode in ("none", "full")
        }
        picture = show.memory_bars(estimates, gpu="h100", title="Llama 3 8B")
        assert flaws(picture) == []
        assert repr(picture).startswith("Llama 3 8B. none: params 15 GiB, grads 15 GiB, ")
        (axes,) = picture.figure.axes
        unit = 2**30
        widths = [patch.get_width() * unit for patch in axes.patches]
        expected = [
            getattr(estimate, f"{name}_bytes")
            for estimate in estimates.values()
            for name in (*CATEGORIES, "transient")
        ]
        assert widths == pytest.approx(expected)
        moments = [patch for patch in axes.patches][4::5]
        assert {to_hex(patch.get_facecolor()) for patch in moments} == {"#bbbbbb"}

    def test_memory_bars_of_one_estimate_without_a_gpu(self) -> None:
        estimate = predict_memory(preset("gpt2"), seq_len=128)
        picture = show.memory_bars(estimate)
        assert flaws(picture) == [] and "fit" not in repr(picture)
        with pytest.raises(ValueError, match="no GPU is called"):
            show.memory_bars(estimate, gpu="h900")
