"""`playbook memory --model`: presets and files, and what follows from the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from playbook_utils.commands import main
from playbook_utils.predict.layout import ParallelLayout
from playbook_utils.predict.memory import predict_memory
from playbook_utils.predict.presets import PRESETS, preset
from tests.commands.test_memory import CONFIG, LLAMA, ask


class TestDefaults:
    @pytest.mark.parametrize("name", PRESETS)
    def test_every_preset_has_an_answer_without_more(self, capsys: Any, name: str) -> None:
        longest = {"gpt2": 1024, "gpt-3-175b": 2048, "course-gpt-tiny": preset(name).max_seq_len}
        assert ask(capsys, model=name)["seq_len"] == min(longest.get(name, 4096), 4096)

    def test_no_more_tokens_than_learned_positions(self, capsys: Any) -> None:
        assert main(["memory", "--model", "gpt2", "--seq", "1025"]) == 2
        err = capsys.readouterr().err
        assert err.startswith("playbook memory: --seq is 1025") and "1024 learned positions" in err
        assert err.endswith("use at most 1,024 tokens\n")

    def test_attention_is_unfused_where_a_model_trains_with_dropout(self, capsys: Any) -> None:
        assert ask(capsys, model="gpt2")["attention"] == "unfused"
        assert ask(capsys, "--attention", "flash", model="gpt2")["attention"] == "flash"
        assert ask(capsys)["attention"] == "flash"


class TestWords:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--seq", "0"], "--seq is 0"),
            (["--microbatch", "0"], "--microbatch is 0"),
            (["--microbatches", "0"], "--microbatches is 0"),
            (["--virtual-stages", "2"], "--virtual-stages is 2"),
            (["--cp", "3"], "cp is 3 and must divide --seq, 4096"),
        ],
    )
    def test_messages_speak_of_flags(self, capsys: Any, arguments: list[str], words: str) -> None:
        assert main(["memory", "--model", "llama-3-8b", *arguments]) == 2
        assert words in capsys.readouterr().err

    def test_so_do_notes(self, capsys: Any) -> None:
        assert main(["memory", "--model", "llama-3-8b", "--sp"]) == 0
        assert "Note: --sp has no effect at tp=1." in capsys.readouterr().out

    def test_parameters_are_those_of_the_rank(self, capsys: Any) -> None:
        stage = predict_memory(preset("llama-3-8b"), seq_len=4096, layout=ParallelLayout(pp=2))
        assert stage.num_params < LLAMA
        assert main(["memory", "--model", "llama-3-8b", "--pp", "2"]) == 0
        assert f"per rank, {stage.num_params:,} parameters, pipeline" in capsys.readouterr().out
        assert main(["memory", "--model", "llama-3-8b", "--dp", "64", "--zero", "3"]) == 0
        out = capsys.readouterr().out
        assert f"per rank, {LLAMA:,} parameters ({LLAMA // 64:,} of them kept), the only" in out


class TestFiles:
    def test_a_file_may_have_any_name(
        self, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "mine").write_text(json.dumps({**CONFIG, "brand_new_field": 1}))
        monkeypatch.chdir(tmp_path)
        assert main(["memory", "--model", "mine", "--json"]) == 0
        out, err = capsys.readouterr()
        assert "brand_new_field" in err
        assert json.loads(out)["model"]["ignored_fields"] == ["brand_new_field"]

    def test_a_preset_ignores_nothing(self, capsys: Any) -> None:
        assert main(["memory", "--model", "llama-3-8b", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["model"]["ignored_fields"] == []

    def test_names_in_a_file_do_not_reach_the_terminal_as_commands(
        self, capsys: Any, tmp_path: Path
    ) -> None:
        path = tmp_path / "config.json"
        names = {"_name_or_path": "org/re\x1b[31md\n", "fi\x1b]0;eld\x07": 1}
        path.write_text(json.dumps({**CONFIG, **names}))
        assert main(["memory", "--model", str(path)]) == 0
        out, err = capsys.readouterr()
        assert out.startswith("re[31md: ") and "fi]0;eld" in err
        assert not {"\x1b", "\x07"} & {*out, *err} and err.count("\n") == 1
