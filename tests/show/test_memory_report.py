"""What stands around the explorer's bars: verdict, table, remarks, and why not."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from xml.etree import ElementTree

import pytest

from playbook_utils.predict.book_widget import widget_memory, widget_shape
from playbook_utils.predict.estimate import CATEGORIES, MOMENTS
from playbook_utils.predict.hardware import gpu
from playbook_utils.predict.headroom import gib_text, verdict
from playbook_utils.predict.layout import ParallelLayout
from playbook_utils.predict.memory import predict_memory
from playbook_utils.predict.presets import preset
from playbook_utils.show.memory_report import (
    DIFFERENCES,
    book_widget,
    explorer_html,
    with_labels,
)
from playbook_utils.show.memory_settings import MemorySettings, explore_memory

LLAMA = MemorySettings(preset("llama-3-8b"), attention="flash")
H100 = gpu("h100-sxm")
SVG = "{http://www.w3.org/2000/svg}"


def table(html: str) -> dict[str, list[str]]:
    """The cells of each row: bytes, GiB, and what the book's widget says."""
    rows = [row for row in ElementTree.fromstring(html).iter("tr") if row.get("data-name")]
    return {row.get("data-name", ""): [cell.text or "" for cell in row.iter("td")] for row in rows}


class TestReport:
    def test_has_the_numbers_the_verdict_and_what_is_left_out(self) -> None:
        settings = replace(LLAMA, layout={"pp": 2, "dp": 4, "zero_stage": 3})
        html = explorer_html(settings, H100)
        estimate = explore_memory(settings)
        assert not isinstance(estimate, str)
        numbers = table(html)
        assert list(numbers) == [*CATEGORIES, "total", "transient", "peak"]
        for name, (in_bytes, in_gib) in numbers.items():
            size = getattr(estimate, f"{name}_bytes")
            assert (in_bytes, in_gib) == (f"{size:,}", gib_text(size))
        assert html.index(f"{verdict(estimate, H100)[1:]}.") < html.index("<svg")
        assert f"For a moment: {MOMENTS[estimate.moment]}." in unescape(html)
        assert "Ranks: 8." in html and f"pipeline stage {estimate.stage} of 0 to 1" in html
        (kept,) = estimate.microbatches_in_flight
        assert f"Micro-batches kept at the peak: {kept}." in html
        assert f"ZeRO-3 gathers up to {gib_text(estimate.gathered_bytes)} for a moment" in html
        assert "Not counted: CUDA context" in html
        plain = explorer_html(LLAMA, H100)
        assert "pipeline" not in plain and "ZeRO-3" not in plain and "kept at the peak" not in plain

    @pytest.mark.parametrize("recompute", ["none", "selective"])
    @pytest.mark.parametrize("mlp", ["gelu", "relu"])
    @pytest.mark.parametrize("precision", ["bf16", "fp32"])
    def test_equals_the_books_widget_where_that_is_right(
        self, recompute: str, mlp: str, precision: str
    ) -> None:
        sizes = {"dim": 512, "num_layers": 12, "num_heads": 8, "vocab_size": 30522}
        shape = widget_shape(**sizes, ff_dim=2048, seq_len=128, mlp=mlp)
        settings = MemorySettings(
            shape,
            layout={"dp": 4, "zero_stage": 2},
            seq_len=128,
            microbatch_size=32,
            precision=precision,
            recompute=recompute,
        )
        estimate = explore_memory(settings)
        book = book_widget(settings)
        assert book is not None and not isinstance(estimate, str)
        for name in (*CATEGORIES, "total"):
            assert book[name] == getattr(estimate, f"{name}_bytes"), name

    def test_the_books_widget_stands_beside_where_it_has_the_inputs(self) -> None:
        settings = replace(
            LLAMA,
            layout={"tp": 8, "dp": 2, "zero_stage": 1, "sequence_parallel": True},
            microbatch_size=3,
            precision="fp32",
            optimizer_bytes=4,
            recompute="full",
        )
        expected = widget_memory(
            dim=4096,
            ff_dim=14336,
            num_layers=32,
            num_heads=32,
            seq_len=4096,
            vocab_size=128256,
            microbatch_size=3,
            optimizer_multiplier=4,
            tp=8,
            dp=2,
            zero_stage=1,
            mlp="swiglu",
            mixed=False,
            sequence_parallel=True,
            recompute="full",
        )
        found = table(explorer_html(settings))
        for name in CATEGORIES:
            assert found[name][2] == f"{expected[name] / 2**30:,.2f} GiB"
        assert found["total"][2] == gib_text(sum(expected[name] for name in CATEGORIES))
        assert (found["transient"][2], found["peak"][2]) == ("", "")
        without = [replace(LLAMA, layout={"pp": 2}), replace(LLAMA, layout={"cp": 2})]
        for settings in [*without, MemorySettings(preset("mixtral-8x7b"))]:
            html = explorer_html(settings)
            assert len(table(html)["total"]) == 2 and "The book's widget has no" in html
        assert "The book's widget has no" not in explorer_html(LLAMA)

    def test_the_impossible_is_a_sentence_and_nothing_else(self) -> None:
        html = explorer_html(replace(LLAMA, layout={"tp": 64}), H100)
        assert 'tp is 64 and must divide "heads a", 32' in html and 'role="alert"' in html
        assert "<svg" not in html and "<table" not in html

    def test_notes_of_the_layout_are_shown(self) -> None:
        html = explorer_html(replace(LLAMA, layout={"sequence_parallel": True}))
        assert 'Note: "sequence parallel" has no effect at tp=1.' in html

    def test_without_a_moment_there_is_no_sentence_of_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        estimate = explore_memory(LLAMA)
        assert not isinstance(estimate, str)
        calm = replace(estimate, transient_bytes=0)
        monkeypatch.setattr("playbook_utils.show.memory_report.explore_memory", lambda _: calm)
        html = explorer_html(LLAMA)
        assert "For a moment:" not in html
        assert table(html)["peak"][0] == table(html)["total"][0]

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
        settings = replace(LLAMA, precision=precision, optimizer_bytes=moments)
        assert f"Bytes a parameter: {words}." in explorer_html(settings)
        assert settings.recipe().bytes_per_param == int(words.split("= ")[1])

    def test_parameters_are_those_of_the_rank(self) -> None:
        model = "Model: 8,030,261,248 parameters."
        html = explorer_html(replace(LLAMA, layout={"pp": 2}))
        stage = predict_memory(LLAMA.base, seq_len=4096, layout=ParallelLayout(pp=2))
        assert stage.num_params < 5e9
        assert model in html and f"This rank: {stage.num_params:,} parameters." in html
        html = explorer_html(replace(LLAMA, layout={"dp": 64, "zero_stage": 2}))
        assert model in html and "This rank: 8,030,261,248 parameters." in html
        html = explorer_html(replace(LLAMA, layout={"dp": 64, "zero_stage": 3}))
        assert (
            f"with 8,030,261,248 parameters and, by ZeRO-3, keeps {8_030_261_248 // 64:,}" in html
        )

    def test_the_square_is_named_where_only_the_book_counts_it(self) -> None:
        def square(settings: MemorySettings) -> list[str]:
            return re.findall(
                r"difference in activations .* widget, ([\d.]+ GiB) is the a s",
                explorer_html(settings),
            )

        a_s2_b = 32 * 4096**2
        assert square(LLAMA) == [gib_text(32 * 5 * a_s2_b)]
        assert square(replace(LLAMA, layout={"tp": 4})) == [gib_text(32 * 5 * a_s2_b // 4)]
        assert square(replace(LLAMA, precision="fp32")) == [gib_text(32 * 9 * a_s2_b)]
        for settings in (
            replace(LLAMA, attention="unfused"),
            replace(LLAMA, recompute="full"),
            replace(LLAMA, recompute="selective"),
            replace(LLAMA, layout={"pp": 2}),
        ):
            assert square(settings) == []

    def test_all_of_the_gap_for_llama_3_8b_is_accounted_for(self) -> None:
        """Of the explorer's first page, by hand: each term is one of the listed differences."""
        book, estimate = book_widget(LLAMA), explore_memory(LLAMA)
        assert book is not None and not isinstance(estimate, str)
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


def test_fields_are_called_as_on_the_page() -> None:
    assert with_labels("num_heads is 32, num_kv_heads 5, head_dim 3, dim=4") == (
        '"heads a" is 32, "kv heads (GQA)" 5, head_dim 3, "hidden h"=4'
    )
    assert with_labels("moe.experts_per_token is 9") == '"experts a token" is 9'
    assert with_labels("seq_len / cp is 4 and tp 8") == '"sequence s" / cp is 4 and tp 8'
