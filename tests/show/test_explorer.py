"""The memory explorer's controls: each is wired to what is computed, and only once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from playbook_utils import show
from playbook_utils.predict.hardware import gpu
from playbook_utils.predict.presets import PRESETS, preset
from playbook_utils.predict.shapes import ModelShape
from playbook_utils.predict.training import train
from playbook_utils.show.explorer import MemoryExplorer, with_labels
from playbook_utils.show.explorer_page import DIFFERENCES, explorer_page

LLAMA = preset("llama-3-8b")


@pytest.fixture
def explorer() -> MemoryExplorer:
    return MemoryExplorer(train(LLAMA), "h100-sxm")


def shown(explorer: MemoryExplorer) -> str:
    return str(explorer.result.value)


def page(shape: ModelShape, gpu_name: str | None = "h100-sxm", **settings: Any) -> str:
    limit = None if gpu_name is None else gpu(gpu_name)
    return with_labels(explorer_page(train(shape, **settings), limit))


def redraws(explorer: MemoryExplorer) -> list[Any]:
    """What is shown from now on."""
    seen: list[Any] = []
    explorer.result.observe(seen.append, names="value")
    return seen


class TestWiring:
    def test_it_starts_with_the_settings_given(self, explorer: MemoryExplorer) -> None:
        assert shown(explorer) == page(LLAMA)
        start = {"tp": 4, "num_microbatches": 6, "pp": 3, "seq_len": 5000, "microbatch_size": 99}
        start |= {"optimizer_bytes": 4, "precision": "BF16-FP32-Grads"}
        other = MemoryExplorer(train(LLAMA, **start), None)
        assert shown(other) == page(LLAMA, None, **start)
        assert other.controls["seq_len"].value == 5000
        assert other.controls["precision"].value == "bf16-fp32-grads"
        assert DIFFERENCES in [getattr(child, "value", "") for child in other.box.children]

    @pytest.mark.parametrize(
        ("control", "value"),
        [
            *[("dp", 8), ("tp", 8), ("cp", 2), ("pp", 4), ("sequence_parallel", True)],
            *[("zero_stage", 3), ("schedule", "afab"), ("num_microbatches", 8)],
            *[("seq_len", 8192), ("microbatch_size", 2), ("precision", "fp32")],
            *[("optimizer_bytes", 2), ("recompute", "full"), ("attention", "unfused")],
            *[("num_layers", 16), ("num_heads", 16), ("num_kv_heads", 32), ("dim", 8192)],
            *[("ff_dim", 11008), ("vocab_size", 32000), ("mlp", "relu"), ("tied", True)],
        ],
    )
    def test_each_control_computes_once_and_shows_its_settings(
        self, explorer: MemoryExplorer, control: str, value: Any
    ) -> None:
        seen = redraws(explorer)
        explorer.controls[control].value = value
        assert shown(explorer) == page(LLAMA, **{control: value})
        assert len(seen) == (shown(explorer) != page(LLAMA))
        is_of_the_model = hasattr(LLAMA, control)
        assert explorer.controls["preset"].value == ("custom" if is_of_the_model else "llama-3-8b")

    def test_dropout_leaves_the_attention_that_is_shown(self, explorer: MemoryExplorer) -> None:
        explorer.controls["dropout"].value = True
        assert shown(explorer) == page(LLAMA, dropout=True, attention="flash")

    def test_the_gpu_moves_the_line(self, explorer: MemoryExplorer) -> None:
        explorer.controls["gpu"].value = "h200"
        assert shown(explorer) == page(LLAMA, "h200")
        explorer.controls["gpu"].value = None
        assert shown(explorer) == page(LLAMA, None)

    def test_a_preset_sets_a_dozen_fields_and_computes_once(self, explorer: MemoryExplorer) -> None:
        seen = redraws(explorer)
        explorer.controls["preset"].value = "mixtral-8x7b"
        assert len(seen) == 1 and shown(explorer) == page(preset("mixtral-8x7b"))
        assert explorer.controls["num_experts"].layout.display is None
        explorer.controls["num_experts"].value = 4
        assert explorer.controls["preset"].value == "custom"
        assert shown(explorer) == page(preset("mixtral-8x7b"), num_experts=4)
        explorer.controls["preset"].value = "gpt2"
        assert explorer.controls["num_experts"].layout.display == "none"
        assert explorer.controls["attention"].value == "unfused"
        assert "sequence set to 1,024: the model has no more" in explorer.note.value.lower()
        assert shown(explorer) == page(preset("gpt2"), seq_len=1024)

    @pytest.mark.parametrize("name", PRESETS)
    def test_no_preset_is_a_dead_end(self, explorer: MemoryExplorer, name: str) -> None:
        explorer.controls["preset"].value = name
        assert 'role="img"' in shown(explorer)
        shape = preset(name)
        longest = min(4096, shape.max_seq_len) if shape.position == "learned" else 4096
        assert explorer.controls["seq_len"].value == longest
        assert bool(explorer.note.value) == (longest < 4096)
        explorer.controls["seq_len"].value = 128
        explorer.controls["preset"].value = "llama-3-70b"
        explorer.controls["preset"].value = name
        assert explorer.controls["seq_len"].value == 128 and explorer.note.value == ""

    def test_ep_and_stages_a_rank_count_where_they_have_a_meaning(self) -> None:
        mixtral = preset("mixtral-8x7b")
        explorer = MemoryExplorer(train(mixtral, dp=8), "h100-sxm")
        explorer.controls["ep"].value = 8
        assert shown(explorer) == page(mixtral, dp=8, ep=8) != page(mixtral, dp=8)
        layout = {"pp": 2, "schedule": "interleaved_1f1b"}
        explorer = MemoryExplorer(train(LLAMA, **layout, virtual_stages=2), "h100-sxm")
        explorer.controls["virtual_stages"].value = 4
        assert shown(explorer) == page(LLAMA, **layout, virtual_stages=4)
        assert shown(explorer) != page(LLAMA, **layout, virtual_stages=2)

    def test_after_the_impossible_all_values_are_there_and_can_be_changed(
        self, explorer: MemoryExplorer
    ) -> None:
        explorer.controls["dp"].value = 4
        explorer.controls["tp"].value = 64
        assert 'tp is 64 and must divide "heads a", 32' in shown(explorer)
        assert 'role="alert"' in shown(explorer) and 'role="img"' not in shown(explorer)
        assert (explorer.controls["dp"].value, explorer.controls["tp"].value) == (4, 64)
        explorer.controls["num_heads"].value = 64
        explorer.controls["num_kv_heads"].value = 64
        assert shown(explorer) == page(LLAMA, num_heads=64, num_kv_heads=64, dp=4, tp=64)

    def test_the_fields_of_a_latent_attention_model_stay_together(
        self, explorer: MemoryExplorer
    ) -> None:
        explorer.controls["preset"].value = "deepseek-v3"
        assert explorer.controls["num_kv_heads"].disabled
        explorer.controls["num_heads"].value = 64
        assert 'role="img"' in shown(explorer)
        assert explorer.controls["num_kv_heads"].value == 64
        explorer.controls["preset"].value = "llama-3-8b"
        assert not explorer.controls["num_kv_heads"].disabled


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
        seen = redraws(explorer)
        explorer.controls["config_path"].value = f" {path} "
        assert len(seen) == 1
        assert explorer.controls["preset"].value == "custom"
        values = {name: explorer.controls[name].value for name in ("dim", "num_layers", "tied")}
        assert values == {"dim": 256, "num_layers": 3, "tied": True}
        assert "brand_new_field" in explorer.note.value and str(path) in explorer.note.value
        explorer.controls["num_layers"].value = 6
        assert explorer.values()["num_layers"] == 6
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
        assert shown(explorer) == page(shape, seq_len=512, attention="unfused")

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


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is displayed."""
    found: list[Any] = []
    monkeypatch.setattr("IPython.display.display", found.append)
    return found


class TestShow:
    def test_memory_explorer_displays_the_controls(self, made: list[Any]) -> None:
        show.memory_explorer("llama-3-70b", gpu="H200", tp=8)
        assert made[0].children[2].value == page(preset("llama-3-70b"), "h200", tp=8)

    def test_gpt2_starts_with_as_many_tokens_as_it_has_positions(self, made: list[Any]) -> None:
        show.memory_explorer("gpt2")
        assert made[0].children[2].value == page(preset("gpt2"), seq_len=1024)

    @pytest.mark.parametrize(
        ("model", "settings", "words"),
        [
            ("llama-3-8b", {"tp": 64}, "cannot start there: tp is 64"),
            ("llama-3-8", {}, "llama-3-8b"),
            ("llama-3-8b", {"nope": 1}, "no 'nope': expected names of num_layers"),
            ("gpt2", {"seq_len": 2048}, "position"),
        ],
    )
    def test_an_impossible_start_is_refused(
        self, model: str, settings: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(ValueError, match=words):
            show.memory_explorer(model, **settings)


def test_fields_are_called_as_on_the_page() -> None:
    assert with_labels("num_heads is 32, num_kv_heads 5, head_dim 3, dim=4") == (
        '"heads a" is 32, "kv heads (GQA)" 5, head_dim 3, "hidden h"=4'
    )
    assert with_labels("moe.experts_per_token is 9") == '"experts a token" is 9'
    assert with_labels("seq_len / cp is 4 and tp 8") == '"sequence s" / cp is 4 and tp 8'
