"""The memory explorer: what is computed and drawn, and that its controls are wired to it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from playbook_utils import show
from playbook_utils.predict.hardware import gpu
from playbook_utils.predict.layout import ParallelLayout
from playbook_utils.predict.memory import predict_memory
from playbook_utils.predict.precision import recipe
from playbook_utils.predict.presets import PRESETS, preset
from playbook_utils.show.memory_explorer import MemoryExplorer
from playbook_utils.show.memory_report import DIFFERENCES, explorer_html
from playbook_utils.show.memory_settings import MemorySettings, explore_memory, shape_values

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
            ("llama-3-8b", {"layout": {"tp": 64}}, ["num_heads, 32", "tp is 64"]),
            ("llama-3-8b", {"layout": {"ep": 2, "dp": 2}}, ["no experts"]),
            ("llama-3-8b", {"layout": {"ep": 2}}, ["ep", "dp x cp"]),
            ("llama-3-8b", {"layout": {"pp": 64}}, ["num_layers", "pp 64"]),
            ("llama-3-8b", {"layout": {"schedule": "interleaved_1f1b", "pp": 2}}, ["virtual"]),
            ("llama-3-8b", {"changes": {"num_heads": 30}}, ["num_heads"]),
            ("llama-3-8b", {"changes": {"num_kv_heads": 5}}, ["num_kv_heads"]),
            ("mixtral-8x7b", {"changes": {"experts_per_token": 9}}, ["experts_per_token", "9"]),
            ("gpt2", {"seq_len": 2048}, ["2048", "use at most 1,024 tokens"]),
            ("llama-3-8b", {"changes": {"num_layer": 3, "dim": 1024}}, ["'num_layer'", "dim"]),
            ("llama-3-8b", {"changes": {"num_experts": 8}}, ["'num_experts'"]),
        ],
    )
    def test_what_is_impossible_gives_one_sentence(
        self, base: str, settings: dict[str, Any], words: list[str]
    ) -> None:
        sentence = explore_memory(MemorySettings(preset(base), **settings))
        assert isinstance(sentence, str) and "\n" not in sentence
        assert [word for word in words if word not in sentence] == []


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
        assert "sequence set to 1,024: the model has no more" in explorer.note.value.lower()
        gpt2 = MemorySettings(preset("gpt2"), seq_len=1024, attention="unfused")
        assert shown(explorer) == explorer_html(gpt2, H100)

    @pytest.mark.parametrize("name", PRESETS)
    def test_no_preset_is_a_dead_end(self, explorer: MemoryExplorer, name: str) -> None:
        explorer.controls["preset"].value = name
        assert "<svg" in shown(explorer)
        shape = preset(name)
        longest = min(4096, shape.max_seq_len) if shape.position == "learned" else 4096
        assert explorer.controls["seq_len"].value == longest
        assert bool(explorer.note.value) == (longest < 4096)
        explorer.controls["seq_len"].value = 128
        explorer.controls["preset"].value = "llama-3-70b"
        explorer.controls["preset"].value = name
        assert explorer.controls["seq_len"].value == 128 and explorer.note.value == ""

    def test_experts_spread_over_the_ranks_that_ep_says(self) -> None:
        mixtral = MemorySettings(preset("mixtral-8x7b"), layout={"dp": 8})
        explorer = MemoryExplorer(mixtral, "h100-sxm")
        explorer.controls["ep"].value = 8
        spread = replace(mixtral, layout={"dp": 8, "ep": 8})
        assert shown(explorer) == explorer_html(spread, H100)
        assert shown(explorer) == shown(MemoryExplorer(spread, "h100-sxm"))
        assert shown(explorer) != explorer_html(mixtral, H100)

    def test_stages_a_rank_count_where_the_schedule_is_interleaved(self) -> None:
        layout = {"pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}
        explorer = MemoryExplorer(replace(LLAMA, layout=layout), "h100-sxm")
        assert shown(explorer) == explorer_html(replace(LLAMA, layout=layout), H100)
        explorer.controls["virtual_stages"].value = 4
        four = replace(LLAMA, layout={**layout, "virtual_stages": 4})
        assert shown(explorer) == explorer_html(four, H100)
        assert shown(explorer) != explorer_html(replace(LLAMA, layout=layout), H100)

    def test_the_precision_may_be_written_in_capitals(self) -> None:
        explorer = MemoryExplorer(replace(LLAMA, precision="BF16-FP32-Grads"), None)
        assert explorer.controls["precision"].value == "bf16-fp32-grads"

    def test_after_the_impossible_all_values_are_there_and_can_be_changed(
        self, explorer: MemoryExplorer
    ) -> None:
        explorer.controls["dp"].value = 4
        explorer.controls["tp"].value = 64
        assert 'tp is 64 and must divide "heads a", 32' in shown(explorer)
        assert "<svg" not in shown(explorer)
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
        assert explorer.controls["num_kv_heads"].value == 64
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
        # The file is no longer what is shown; it can be read again.
        assert explorer.controls["config_path"].value == ""
        assert "brand_new_field" in explorer.note.value
        explorer.controls["config_path"].value = str(path)
        assert explorer.controls["num_layers"].value == 3
        explorer.controls["preset"].value = "llama-3-8b"
        assert explorer.controls["config_path"].value == "" and explorer.note.value == ""

    def test_a_config_of_gpt2_brings_its_attention_and_its_longest_sequence(
        self, explorer: MemoryExplorer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gpt2 = {
            "model_type": "gpt2",
            **{"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512, "vocab_size": 1000},
            **{"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
        }
        (tmp_path / "gpt2.json").write_text(json.dumps(gpt2))
        monkeypatch.setenv("HOME", str(tmp_path))
        assert explorer.controls["attention"].value == "flash"
        explorer.controls["config_path"].value = "~/gpt2.json"
        assert explorer.controls["attention"].value == "unfused"
        assert explorer.controls["seq_len"].value == 512
        assert "Read ~/gpt2.json. Sequence set to 512" in explorer.note.value
        shape = explorer.base
        assert shape.dropout and shape.position == "learned"
        settings = MemorySettings(shape, seq_len=512, attention="unfused")
        assert shown(explorer) == explorer_html(settings, H100)

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
        assert explorer.note.value == "" and explorer.controls["config_path"].value == ""
        explorer.controls["config_path"].value = str(path)
        assert "Not read:" in explorer.note.value
        explorer.controls["dim"].value = 4096
        assert explorer.note.value == "" and explorer.controls["config_path"].value == ""

    def test_a_home_that_nobody_has_is_told_of(self, explorer: MemoryExplorer) -> None:
        explorer.controls["config_path"].value = "~nobody-of-that-name/config.json"
        assert "Not read:" in explorer.note.value


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
        with pytest.raises(ValueError, match="num_heads"):
            show.memory_explorer(layout={"tp": 64})
        with pytest.raises(ValueError, match="llama-3-8b"):
            show.memory_explorer("llama-3-8")
        with pytest.raises(ValueError, match=r"'nope'.*expected names of num_layers"):
            show.memory_explorer(changes={"nope": 1})

    def test_gpt2_starts_with_as_many_tokens_as_it_has_positions(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[Any] = []
        monkeypatch.setattr("IPython.display.display", made.append)
        show.memory_explorer("gpt2")
        start = MemorySettings(preset("gpt2"), seq_len=1024)
        assert made[0].children[2].value == explorer_html(start, gpu("h100-sxm"))
        with pytest.raises(ValueError, match="position"):
            show.memory_explorer("gpt2", seq_len=2048)

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
