"""What the explorer computes and shows: bars, verdict, numbers, remarks."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from itertools import product
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest

from playbook_utils.predict.book.widget import widget_memory, widget_on, widget_shape
from playbook_utils.predict.estimate import CATEGORIES, MOMENTS
from playbook_utils.predict.hardware import gpu
from playbook_utils.predict.headroom import gib_text, verdict
from playbook_utils.predict.presets import preset
from playbook_utils.predict.training import Training, train
from playbook_utils.show.explorer_page import DIFFERENCES, explorer_page
from playbook_utils.show.style import CATEGORY_COLORS
from playbook_utils.show.units import bytes_text

LLAMA = preset("llama-3-8b")
H100 = gpu("h100-sxm")


class Part(NamedTuple):
    name: str
    size: int
    percent: float
    fill: str


def root_of(training: Training, gpu_name: str | None = "h100-sxm") -> ElementTree.Element:
    html = explorer_page(training, gpu(gpu_name) if gpu_name else None)
    return ElementTree.fromstring(html.replace("<br>", "<br/>"))


def bars_of(root: ElementTree.Element) -> list[list[Part]]:
    """The parts of each bar, from the left; parts say their size while the mouse is on them."""
    rows = []
    for bar in root.iter("div"):
        parts = []
        for part in bar.findall("div[@data-part]"):
            match = re.fullmatch(r".+: ([\d,]+) bytes", part.get("title", ""))
            look = re.match(r"width:([\d.]+)%;background:(.+?);overflow", part.get("style", ""))
            assert match and look
            size = int(match[1].replace(",", ""))
            parts.append(Part(part.get("data-part", ""), size, float(look[1]), look[2]))
        rows += [parts] if parts else []
    return rows


def limit_of(root: ElementTree.Element) -> float | None:
    """Where the dashed line stands, in percent of the bars' room."""
    line = root.find(".//div[@data-limit]")
    return None if line is None else 100 * float(line.get("data-limit", ""))


FAR_APART = [
    train(preset(name), seq_len=seq_len, microbatch_size=b, **({"dp": 8} | layout))
    for name, seq_len, b, layout in product(
        ("llama-3-8b", "llama-3.2-1b"),
        (1024, 8192),
        (1, 2),
        ({}, {"zero_stage": 1}, {"zero_stage": 3}, {"tp": 4, "pp": 2}),
    )
]


class TestBars:
    @pytest.mark.parametrize(
        "training",
        [
            train(LLAMA),
            train(preset("deepseek-v3"), dp=64, ep=64, zero_stage=3),
            train(preset("course-tiny"), seq_len=128),
            train(LLAMA, pp=4, tp=8, recompute="full"),
        ],
        ids=["llama", "experts", "tiny", "pipeline"],
    )
    def test_parts_are_as_wide_as_they_are_large_and_have_their_numbers(
        self, training: Training
    ) -> None:
        estimate, root = training.estimate, root_of(training)
        rows = bars_of(root)
        expected = [*estimate.parts.values()]
        expected.append({name: getattr(estimate, f"{name}_bytes") for name in CATEGORIES})
        if estimate.transient_bytes:
            expected[-1]["for a moment"] = estimate.transient_bytes
        assert [{part.name: part.size for part in row} for row in rows] == expected
        reach = max(estimate.peak_bytes, (limit_of(root) is not None) * H100.usable_bytes)
        texts = " ".join(root.itertext())
        for part in (part for row in rows for part in row):
            assert part.percent == pytest.approx(100 * part.size / reach, abs=1e-4)
            assert f"{part.name.replace('_', ' ')} {bytes_text(part.size)}" in texts

    def test_colours_are_those_that_the_parts_have_everywhere(self) -> None:
        rows = bars_of(root_of(train(LLAMA)))
        expected = {name: CATEGORY_COLORS[name] for name in CATEGORIES}
        assert {part.name: part.fill for part in rows[-1][:-1]} == expected
        assert rows[-1][-1].fill.startswith("repeating-linear-gradient")
        assert [row[0].fill for row in rows[:-1]] == [c.lower() for c in expected.values()]

    def test_the_gpu_holds_the_rank_where_the_last_bar_ends_left_of_its_line(self) -> None:
        seen = []
        for training, name in product(FAR_APART, ("h100-sxm", "a100-40gb", "l4", "t4")):
            estimate, root = training.estimate, root_of(training, name)
            fits = verdict(estimate, gpu(name)).startswith("fits")
            end, line = sum(part.percent for part in bars_of(root)[-1]), limit_of(root)
            if line is None:
                assert fits and estimate.peak_bytes * 12 < gpu(name).usable_bytes
                continue
            assert fits == (end <= line + 1e-3), (training, name)
            seen.append((fits, estimate.total_bytes <= gpu(name).usable_bytes))
        # Also some whose total alone would fit.
        assert {(True, True), (False, False), (False, True)} == set(seen)

    def test_a_limit_far_beyond_the_bars_is_told_of_instead_of_drawn(self) -> None:
        root = root_of(train(preset("course-tiny"), seq_len=128))
        assert limit_of(root) is None and "79.6 GiB, far to the right" in " ".join(root.itertext())
        assert limit_of(root_of(train(LLAMA), None)) is None

    def test_it_says_in_words_what_it_shows(self) -> None:
        bars = root_of(train(LLAMA)).find("div[@role='img']")
        assert bars is not None
        description = bars.get("aria-label", "")
        assert "optimizer states 89.7 GiB" in description and "does not fit h100-sxm" in description
        assert "total 139 GiB, at the peak 143 GiB. It does not fit" in description


def numbers(training: Training) -> dict[str, list[str]]:
    """Of each row: GiB, bytes, and what the book's widget says."""
    cells = {}
    for place in root_of(training).iter("div"):
        texts = list(place.itertext()) if place.find("span[@data-name]") is not None else []
        names = [span.get("data-name", "") for span in place.findall("span[@data-name]")]
        for name in names:
            start = texts.index(name.replace("_", " ")) + 1
            cells[name] = [text for text in texts[start : start + 3] if text not in ("peak",)]
    return cells


class TestReport:
    def test_has_the_numbers_the_verdict_and_what_is_left_out(self) -> None:
        training = train(LLAMA, pp=2, dp=4, zero_stage=3)
        html, estimate = explorer_page(training, H100), training.estimate
        found = numbers(training)
        assert list(found) == [*CATEGORIES, "total", "peak"]
        for name, (in_gib, in_bytes) in found.items():
            size = getattr(estimate, f"{name}_bytes")
            assert (in_gib, in_bytes) == (gib_text(size), f"{size:,} bytes")
        assert html.index(f"{verdict(estimate, H100)[1:]}.") < html.index("aria-label")
        assert f"For a moment: {MOMENTS[estimate.moment]}." in unescape(html)
        assert "Ranks: 8." in html and f"pipeline stage {estimate.stage} of 0 to 1" in html
        (kept,) = estimate.microbatches_in_flight
        assert f"Micro-batches kept at the peak: {kept}." in html
        assert f"ZeRO-3 gathers up to {gib_text(estimate.gathered_bytes)} for a moment" in html
        assert "Not counted: CUDA context" in html
        plain = explorer_page(train(LLAMA), H100)
        assert "pipeline" not in plain and "ZeRO-3" not in plain and "kept at the peak" not in plain

    def test_a_rank_without_such_a_moment_has_no_peak_beside_its_total(self) -> None:
        training = train(LLAMA)
        calm = replace(training, estimate=replace(training.estimate, transient_bytes=0))
        html = explorer_page(calm, H100)
        assert "peak" not in html and "a moment" not in html

    @pytest.mark.parametrize("recompute", ["none", "selective"])
    @pytest.mark.parametrize("mlp", ["gelu", "relu"])
    @pytest.mark.parametrize("precision", ["bf16", "fp32"])
    def test_equals_the_books_widget_where_that_is_right(
        self, recompute: str, mlp: str, precision: str
    ) -> None:
        sizes = {"dim": 512, "num_layers": 12, "num_heads": 8, "vocab_size": 30522}
        shape = widget_shape(**sizes, ff_dim=2048, seq_len=128, mlp=mlp)
        how = {"seq_len": 128, "microbatch_size": 32, "recompute": recompute}
        training = train(shape, dp=4, zero_stage=2, precision=precision, **how)
        book = widget_on(training)
        assert book is not None
        for name in (*CATEGORIES, "total"):
            assert book[name] == getattr(training.estimate, f"{name}_bytes"), name

    def test_the_books_widget_stands_beside_where_it_has_the_inputs(self) -> None:
        how = {"microbatch_size": 3, "recompute": "full"}
        layout = {"tp": 8, "dp": 2, "sequence_parallel": True, "zero_stage": 1}
        training = train(LLAMA, precision="fp32", optimizer_bytes=4, **how, **layout)
        sizes = {"dim": 4096, "ff_dim": 14336, "num_layers": 32, "num_heads": 32}
        sizes |= {"seq_len": 4096, "vocab_size": 128256, "optimizer_multiplier": 4}
        expected = widget_memory(**sizes, **how, **layout, mlp="swiglu", mixed=False)
        found = numbers(training)
        for name in CATEGORIES:
            assert found[name][2] == f"the book's: {expected[name] / 2**30:,.2f} GiB"
        total = sum(expected[name] for name in CATEGORIES)
        assert found["total"][2] == f"the book's: {gib_text(total)}" and len(found["peak"]) == 2
        for without in (train(LLAMA, pp=2), train(LLAMA, cp=2), train(preset("mixtral-8x7b"))):
            assert "the book's" not in explorer_page(without)
            assert "The book's widget has no" in explorer_page(without)
        assert "The book's widget has no" not in explorer_page(train(LLAMA))

    def test_notes_of_the_layout_are_shown(self) -> None:
        html = explorer_page(train(LLAMA, sequence_parallel=True))
        assert "Note: sequence_parallel has no effect at tp=1." in html

    @pytest.mark.parametrize(
        ("precision", "moments", "words"),
        [
            ("bf16", 8, "2 weights + 2 gradients + 4 master copy + 8 moments = 16"),
            ("fp32", 2, "4 weights + 4 gradients + 2 moments = 10"),
            ("megatron", 8, "2 weights + 4 FP32 gradients + 4 master copy + 8 moments = 18"),
            ("bf16-no-master", 0, "2 weights + 2 gradients = 4"),
        ],
    )
    def test_bytes_a_parameter_are_added_up(self, precision: str, moments: int, words: str) -> None:
        training = train(LLAMA, precision=precision, optimizer_bytes=moments)
        assert f"Bytes a parameter: {words}." in explorer_page(training)
        assert training.recipe.bytes_per_param == int(words.split("= ")[1])

    def test_parameters_are_those_of_the_rank(self) -> None:
        model = "Model: 8,030,261,248 parameters."
        stage = train(LLAMA, pp=2)
        assert stage.estimate.num_params < 5e9
        html = explorer_page(stage)
        assert model in html and f"This rank: {stage.estimate.num_params:,} parameters." in html
        html = explorer_page(train(LLAMA, dp=64, zero_stage=2))
        assert model in html and "This rank: 8,030,261,248 parameters." in html
        html = explorer_page(train(LLAMA, dp=64, zero_stage=3))
        kept = 8_030_261_248 // 64
        assert f"with 8,030,261,248 parameters and, by ZeRO-3, keeps {kept:,}" in html

    def test_the_square_is_named_where_only_the_book_counts_it(self) -> None:
        def square(**settings: Any) -> list[str]:
            pattern = r"difference in activations .* widget, ([\d.]+ GiB) is what attention"
            return re.findall(pattern, explorer_page(train(LLAMA, **settings)))

        a_s2_b = 32 * 4096**2
        assert square() == [gib_text(32 * 5 * a_s2_b)]
        assert square(tp=4) == [gib_text(32 * 5 * a_s2_b // 4)]
        assert square(precision="fp32") == [gib_text(32 * 9 * a_s2_b)]
        assert square(attention="unfused") == square(recompute="full") == square(pp=2) == []
        assert square(recompute="selective") == []


def test_all_of_the_gap_for_llama_3_8b_is_accounted_for() -> None:
    """Of the explorer's first page, by hand: each term is one of the listed differences."""
    training = train(LLAMA)
    book, estimate = widget_on(training), training.estimate
    assert book is not None
    s, h, a, layers, vocabulary, ff, kv = 4096, 4096, 32, 32, 128_256, 14_336, 1024
    fewer_params = {
        "a head of its own": -vocabulary * h,
        "learned positions": s * h,
        "an MLP of 8 h^2, not of three matrices": layers * (8 * h**2 - 3 * h * ff),
        "as many key/value heads as heads": layers * 2 * h * (h - kv),
        "biases and LayerNorm": layers * (13 - 2) * h + (2 - 1) * h,
    }
    fewer_kept = {
        "the square": layers * 5 * a * s**2,
        "dropout masks": layers * 2 * s * h + s * h,
        "SwiGLU stores 4": layers * 2 * s * ff,
        "as many key/value heads as heads": layers * 2 * 2 * s * (h - kv),
        "rotary table": -2 * 2 * s * (h // a),
    }
    gap = 16 * sum(fewer_params.values()) + sum(fewer_kept.values())
    assert book["total"] - estimate.total_bytes == gap
    assert max(fewer_kept.values()) == fewer_kept["the square"] == 80 * 2**30
    for fault in ("attention is unfused: (2B+1) a s^2 b", "the head shares the embedding"):
        assert fault in unescape(DIFFERENCES)


def test_what_differs_from_the_book_is_a_folded_list() -> None:
    root = ElementTree.fromstring(DIFFERENCES)
    assert root.tag == "details" and "book" in root.findtext("summary", "")
    assert len(root.findall("ul/li")) >= 5
