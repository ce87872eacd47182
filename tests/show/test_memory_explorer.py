"""The memory explorer: what is computed and drawn, and that its controls are wired to it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from playbook_utils import show
from playbook_utils.predict.book_widget import widget_memory, widget_shape
from playbook_utils.predict.hardware import gpu
from playbook_utils.predict.headroom import gib_text, usable_bytes, verdict
from playbook_utils.predict.layout import ParallelLayout
from playbook_utils.predict.memory import CATEGORIES, predict_memory
from playbook_utils.predict.precision import recipe
from playbook_utils.predict.presets import PRESETS, preset
from playbook_utils.show.memory_bars import explorer_svg
from playbook_utils.show.memory_explorer import MemoryExplorer
from playbook_utils.show.memory_report import DIFFERENCES, book_widget, explorer_html
from playbook_utils.show.memory_settings import MemorySettings, explore_memory, shape_values
from playbook_utils.show.svg import text_width
from playbook_utils.show.units import bytes_text
from tests.show.drawn import flaws

LLAMA = MemorySettings(preset("llama-3-8b"), attention="flash")
H100 = gpu("h100-sxm")
SVG = "{http://www.w3.org/2000/svg}"


class TestExploreMemory:
    def test_is_the_prediction_for_these_settings(self) -> None:
        settings = replace(
            LLAMA,
            changes={"num_layers": 40, "mlp": "gelu", "tied": True},
            layout={"tp": 4, "dp": 2, "zero_stage": 1, "sequence_parallel": True},
            seq_len=8192,
            microbatch_size=3,
            precision="bf16-fp32-grads",
            optimizer_bytes=4,
            recompute="full",
            attention="unfused",
        )
        shape = preset("llama-3-8b").with_changes(num_layers=40, mlp="gelu", tied=True)
        assert explore_memory(settings) == predict_memory(
            shape,
            seq_len=8192,
            microbatch_size=3,
            layout=ParallelLayout(dp=2, tp=4, zero_stage=1, sequence_parallel=True),
            precision=replace(recipe("bf16-fp32-grads"), moments_bytes=4),
            recompute="full",
            attention="unfused",
        )

    @pytest.mark.parametrize("name", PRESETS)
    def test_the_values_of_a_preset_are_that_preset(self, name: str) -> None:
        shape = preset(name)
        assert MemorySettings(shape, shape_values(shape)).shape() == shape

    def test_experts_and_latent_attention_follow_the_controls(self) -> None:
        mixtral = MemorySettings(preset("mixtral-8x7b"), {"num_experts": 16})
        assert mixtral.shape().moe == replace(preset("mixtral-8x7b").moe, num_experts=16)
        deepseek = MemorySettings(preset("deepseek-v3"), {"num_heads": 64, "num_kv_heads": 128})
        assert (deepseek.shape().num_heads, deepseek.shape().num_kv_heads) == (64, 64)

    @pytest.mark.parametrize(
        ("base", "settings", "words"),
        [
            ("llama-3-8b", {"layout": {"tp": 64}}, ["num_heads", "32", "tp 64"]),
            ("llama-3-8b", {"layout": {"ep": 2, "dp": 2}}, ["no experts"]),
            ("llama-3-8b", {"layout": {"ep": 2}}, ["ep", "dp x cp"]),
            ("llama-3-8b", {"layout": {"pp": 64}}, ["num_layers", "pp 64"]),
            ("llama-3-8b", {"layout": {"schedule": "interleaved_1f1b", "pp": 2}}, ["virtual"]),
            ("llama-3-8b", {"changes": {"num_heads": 30}}, ["num_heads"]),
            ("llama-3-8b", {"changes": {"num_kv_heads": 5}}, ["num_kv_heads"]),
            ("mixtral-8x7b", {"changes": {"experts_per_token": 9}}, ["experts_per_token", "9"]),
            ("gpt2", {"seq_len": 2048}, ["2048", "1024", "position"]),
        ],
    )
    def test_what_is_impossible_gives_one_sentence(
        self, base: str, settings: dict[str, Any], words: list[str]
    ) -> None:
        sentence = explore_memory(MemorySettings(preset(base), **settings))
        assert isinstance(sentence, str) and "\n" not in sentence
        assert [word for word in words if word not in sentence] == []


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

    def test_lengths_are_in_proportion_and_so_is_the_limit(self) -> None:
        estimate = explore_memory(LLAMA)
        assert not isinstance(estimate, str)
        root = drawing(LLAMA)
        bars = [r for r in root.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
        (line,) = [one for one in root.iter(f"{SVG}line") if one.get("stroke-dasharray")]
        ends = [float(bar.get("x", "")) + float(bar.get("width", "")) + 1 for bar in bars]
        start = min(float(bar.get("x", "")) for bar in bars)
        limit = float(line.get("x1", "")) - start
        ratio = usable_bytes(H100) / estimate.total_bytes
        assert limit / (max(ends) - start) == pytest.approx(ratio, rel=0.003)
        moments = [bar for bar in bars if bar.findtext(f"{SVG}title", "").startswith("optimizer")]
        share = estimate.optimizer_states_bytes / estimate.total_bytes
        width = float(moments[0].get("width", "")) + 1
        assert width / (max(ends) - start) == pytest.approx(share, rel=0.003)

    def test_a_limit_far_beyond_the_bars_is_told_of_instead_of_drawn(self) -> None:
        root = drawing(CASES["tiny"])
        assert not [one for one in root.iter(f"{SVG}line") if one.get("stroke-dasharray")]
        assert [text for text, *_ in text_boxes(root) if "79.6 GiB, far to the right" in text]

    def test_it_says_in_words_what_it_shows(self) -> None:
        description = drawing(LLAMA).findtext(f"{SVG}desc", "")
        assert "optimizer states 89.7 GiB" in description and "does not fit h100-sxm" in description


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
        assert list(numbers) == [*CATEGORIES, "total"]
        for name, (in_bytes, in_gib) in numbers.items():
            size = getattr(estimate, f"{name}_bytes")
            assert (in_bytes, in_gib) == (f"{size:,}", f"{size / 2**30:,.2f} GiB")
        assert f"{verdict(estimate, H100)[1:]}." in html
        assert "Ranks: 8." in html and f"pipeline stage {estimate.stage} of 0 to 1" in html
        (kept,) = estimate.microbatches_in_flight
        assert f"Micro-batches kept at the peak: {kept}." in html
        assert f"ZeRO-3 gathers up to {gib_text(estimate.gathered_bytes)}" in html
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
        without = [replace(LLAMA, layout={"pp": 2}), replace(LLAMA, layout={"cp": 2})]
        for settings in [*without, MemorySettings(preset("mixtral-8x7b"))]:
            html = explorer_html(settings)
            assert len(table(html)["total"]) == 2 and "The book's widget has no" in html
        assert "The book's widget has no" not in explorer_html(LLAMA)

    def test_the_impossible_is_a_sentence_and_nothing_else(self) -> None:
        html = explorer_html(replace(LLAMA, layout={"tp": 64}), H100)
        assert "num_heads is 32" in html and 'role="alert"' in html
        assert "<svg" not in html and "<table" not in html

    def test_notes_of_the_layout_are_shown(self) -> None:
        assert "no effect at tp=1" in explorer_html(
            replace(LLAMA, layout={"sequence_parallel": True})
        )


@pytest.fixture
def explorer() -> MemoryExplorer:
    return MemoryExplorer(LLAMA, "h100-sxm")


def shown(explorer: MemoryExplorer) -> str:
    return str(explorer.result.value)


class TestWiring:
    def test_it_starts_with_the_settings_given(self, explorer: MemoryExplorer) -> None:
        assert shown(explorer) == explorer_html(LLAMA, H100)
        start = replace(
            LLAMA,
            layout={"tp": 4, "num_microbatches": 6, "pp": 3},
            seq_len=5000,
            microbatch_size=99,
        )
        other = MemoryExplorer(start, None)
        assert shown(other) == explorer_html(start, None)
        assert other.controls["seq_len"].value == 5000

    @pytest.mark.parametrize(
        ("control", "value", "settings"),
        [
            ("dp", 8, {"layout": {"dp": 8}}),
            ("tp", 8, {"layout": {"tp": 8}}),
            ("cp", 2, {"layout": {"cp": 2}}),
            ("pp", 4, {"layout": {"pp": 4}}),
            ("sequence_parallel", True, {"layout": {"sequence_parallel": True}}),
            ("zero_stage", 3, {"layout": {"zero_stage": 3}}),
            ("schedule", "afab", {"layout": {"schedule": "afab"}}),
            ("num_microbatches", 8, {"layout": {"num_microbatches": 8}}),
            ("seq_len", 8192, {"seq_len": 8192}),
            ("microbatch_size", 2, {"microbatch_size": 2}),
            ("precision", "fp32", {"precision": "fp32"}),
            ("optimizer_bytes", 2, {"optimizer_bytes": 2}),
            ("recompute", "full", {"recompute": "full"}),
            ("attention", "unfused", {"attention": "unfused"}),
            ("num_layers", 16, {"changes": {"num_layers": 16}}),
            ("num_heads", 16, {"changes": {"num_heads": 16}}),
            ("num_kv_heads", 32, {"changes": {"num_kv_heads": 32}}),
            ("dim", 8192, {"changes": {"dim": 8192}}),
            ("ff_dim", 11008, {"changes": {"ff_dim": 11008}}),
            ("vocab_size", 32000, {"changes": {"vocab_size": 32000}}),
            ("mlp", "relu", {"changes": {"mlp": "relu"}}),
            ("tied", True, {"changes": {"tied": True}}),
            ("dropout", True, {"changes": {"dropout": True}}),
        ],
    )
    def test_each_control_computes_once_and_shows_its_settings(
        self, explorer: MemoryExplorer, control: str, value: Any, settings: dict[str, Any]
    ) -> None:
        before = explorer.num_redraws
        explorer.controls[control].value = value
        assert explorer.num_redraws == before + 1
        assert shown(explorer) == explorer_html(replace(LLAMA, **settings), H100)
        is_of_the_model = "changes" in settings
        assert explorer.controls["preset"].value == ("custom" if is_of_the_model else "llama-3-8b")

    def test_the_gpu_moves_the_line(self, explorer: MemoryExplorer) -> None:
        explorer.controls["gpu"].value = "h200"
        assert shown(explorer) == explorer_html(LLAMA, gpu("h200"))
        explorer.controls["gpu"].value = None
        assert shown(explorer) == explorer_html(LLAMA, None)

    def test_a_preset_sets_a_dozen_fields_and_computes_once(self, explorer: MemoryExplorer) -> None:
        before = explorer.num_redraws
        explorer.controls["preset"].value = "mixtral-8x7b"
        assert explorer.num_redraws == before + 1
        assert shown(explorer) == explorer_html(MemorySettings(preset("mixtral-8x7b")), H100)
        assert explorer.controls["num_experts"].layout.display is None
        explorer.controls["num_experts"].value = 4
        assert explorer.controls["preset"].value == "custom"
        explorer.controls["preset"].value = "gpt2"
        assert explorer.controls["num_experts"].layout.display == "none"
        assert explorer.controls["attention"].value == "unfused"
        assert "1024 learned positions" in shown(explorer)
        explorer.controls["seq_len"].value = 1024
        gpt2 = MemorySettings(preset("gpt2"), seq_len=1024, attention="unfused")
        assert shown(explorer) == explorer_html(gpt2, H100)

    def test_after_the_impossible_all_values_are_there_and_can_be_changed(
        self, explorer: MemoryExplorer
    ) -> None:
        explorer.controls["dp"].value = 4
        explorer.controls["tp"].value = 64
        assert "num_heads is 32" in shown(explorer) and "<svg" not in shown(explorer)
        assert (explorer.controls["dp"].value, explorer.controls["tp"].value) == (4, 64)
        explorer.controls["num_heads"].value = 64
        explorer.controls["num_kv_heads"].value = 64
        settings = replace(
            LLAMA,
            changes={"num_heads": 64, "num_kv_heads": 64},
            layout={"dp": 4, "tp": 64},
        )
        assert shown(explorer) == explorer_html(settings, H100)

    def test_the_fields_of_a_latent_attention_model_stay_together(
        self, explorer: MemoryExplorer
    ) -> None:
        explorer.controls["preset"].value = "deepseek-v3"
        assert explorer.controls["num_kv_heads"].disabled
        explorer.controls["num_heads"].value = 64
        assert "<svg" in shown(explorer)
        explorer.controls["preset"].value = "llama-3-8b"
        assert not explorer.controls["num_kv_heads"].disabled

    def test_what_differs_from_the_book_is_listed_folded(self, explorer: MemoryExplorer) -> None:
        assert DIFFERENCES in [getattr(child, "value", "") for child in explorer.box.children]
        root = ElementTree.fromstring(DIFFERENCES)
        assert root.tag == "details" and "book" in root.findtext("summary", "")
        assert len(root.findall("ul/li")) >= 5


CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


class TestConfigFile:
    def test_a_config_fills_the_fields_and_names_what_it_does_not_know(
        self, explorer: MemoryExplorer, tmp_path: Path
    ) -> None:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**CONFIG, "brand_new_field": 1}))
        before = explorer.num_redraws
        explorer.controls["config_path"].value = f" {path} "
        assert explorer.num_redraws == before + 1
        assert explorer.controls["preset"].value == "custom"
        values = {name: explorer.controls[name].value for name in ("dim", "num_layers", "tied")}
        assert values == {"dim": 256, "num_layers": 3, "tied": True}
        assert "brand_new_field" in explorer.note.value and str(path) in explorer.note.value
        explorer.controls["num_layers"].value = 6
        assert explorer.settings().shape().num_layers == 6

    @pytest.mark.parametrize(
        "text",
        [None, "not json", '{"model_type": "<b>"}', json.dumps({**CONFIG, "vocab_size": -1})],
    )
    def test_a_bad_file_is_told_of_in_place_and_changes_nothing(
        self, explorer: MemoryExplorer, tmp_path: Path, text: str | None
    ) -> None:
        path = tmp_path / "config.json"
        if text is not None:
            path.write_text(text)
        before = shown(explorer)
        explorer.controls["config_path"].value = str(path)
        assert "Not read:" in explorer.note.value and "<b>" not in explorer.note.value
        assert shown(explorer) == before
        assert explorer.controls["preset"].value == "llama-3-8b"
        explorer.controls["preset"].value = "llama-3-70b"
        assert explorer.note.value == ""


class TestShow:
    def test_memory_explorer_displays_the_controls(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[Any] = []
        monkeypatch.setattr("IPython.display.display", made.append)
        show.memory_explorer("llama-3-70b", gpu="H200", layout={"tp": 8})
        (box,) = made
        result = box.children[2].value
        start = MemorySettings(preset("llama-3-70b"), layout={"tp": 8})
        assert result == explorer_html(start, gpu("h200"))

    def test_an_impossible_start_is_refused(self) -> None:
        with pytest.raises(ValueError, match="num_heads is 32"):
            show.memory_explorer(layout={"tp": 64})
        with pytest.raises(ValueError, match="llama-3-8b"):
            show.memory_explorer("llama-3-8")

    def test_without_ipywidgets_the_start_is_drawn(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(sys.modules, "ipywidgets", None)
        made: list[Any] = []
        monkeypatch.setattr("IPython.display.display", made.append)
        show.memory_explorer()
        assert "pip install ipywidgets" in capsys.readouterr().out
        (picture,) = made
        assert "does not fit h100-sxm" in repr(picture)

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
            for name in CATEGORIES
        ]
        assert widths == pytest.approx(expected)

    def test_memory_bars_of_one_estimate_without_a_gpu(self) -> None:
        estimate = predict_memory(preset("gpt2"), seq_len=128)
        picture = show.memory_bars(estimate)
        assert flaws(picture) == [] and "fit" not in repr(picture)
        with pytest.raises(ValueError, match="no GPU is called"):
            show.memory_bars(estimate, gpu="h900")
