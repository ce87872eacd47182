"""`playbook memory`: its numbers against arithmetic by hand, its exit status, and what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from playbook_utils.commands import main

GIB = 2**30
# Meta's Llama 3 8B: 128,256 tokens, 32 layers of 4,096, 32 heads and 8 key/value heads, MLP 14,336.
EMBEDDING = HEAD = 128_256 * 4096
LAYER = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336 + 2 * 4096
LLAMA = EMBEDDING + 32 * LAYER + 4096 + HEAD


def ask(capsys: pytest.CaptureFixture[str], *arguments: str, model: str = "llama-3-8b") -> Any:
    """The rank's numbers from --json."""
    assert main(["memory", "--model", model, "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


class TestNumbers:
    def test_llama_3_8b_is_sixteen_bytes_a_parameter(self, capsys: Any) -> None:
        rank = ask(capsys)["rank"]
        assert LLAMA == 8_030_261_248
        assert rank["num_params"] == LLAMA
        assert (rank["params_bytes"], rank["grads_bytes"]) == (2 * LLAMA, 2 * LLAMA)
        assert rank["optimizer_states_bytes"] == 12 * LLAMA
        states = rank["params_bytes"] + rank["grads_bytes"] + rank["optimizer_states_bytes"]
        assert states == 16 * LLAMA
        assert rank["total_bytes"] == states + rank["activations_bytes"]

    def test_activations_of_llama_tensor_by_tensor(self, capsys: Any) -> None:
        tokens = 2 * 1000
        # Norm inputs and the inputs of q k v and gate up; q and output; k v; three of the MLP.
        layer = 4 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 14_336
        end = 2 * 4096 * 2 + 4 * 128_256  # final norm, head; log-probabilities in FP32
        rotary = 2 * 1000 * 128 * 2
        rank = ask(capsys, "--seq", "1000", "--microbatch", "2")["rank"]
        assert rank["activations_bytes"] == tokens * (32 * layer * 2 + end) + rotary

    @pytest.mark.parametrize(
        ("precision", "bytes_each"), [("fp32", (4, 4, 8)), ("bf16-fp32-grads", (2, 6, 12))]
    )
    def test_precision(self, capsys: Any, precision: str, bytes_each: tuple[int, ...]) -> None:
        rank = ask(capsys, "--precision", precision)["rank"]
        found = [rank[f"{name}_bytes"] for name in ("params", "grads", "optimizer_states")]
        assert found == [each * LLAMA for each in bytes_each]

    def test_zero_shards_over_dp(self, capsys: Any) -> None:
        for stage, sharded in enumerate([(), (2,), (1, 2), (0, 1, 2)]):
            rank = ask(capsys, "--dp", "8", "--zero", str(stage))["rank"]
            found = [rank[f"{name}_bytes"] for name in ("params", "grads", "optimizer_states")]
            ways = [8 if i in sharded else 1 for i in range(3)]
            assert found == [each * LLAMA // w for each, w in zip((2, 2, 12), ways, strict=True)]

    def test_tensor_sequence_and_context_parallelism(self, capsys: Any) -> None:
        norms = 65 * 4096
        rank = ask(capsys, "--tp", "8")["rank"]
        assert rank["num_params"] == (LLAMA - norms) // 8 + norms
        whole = ask(capsys, "--recompute", "full")["rank"]["parts"]["activations"]["layer_inputs"]
        for arguments, ways in (["--tp", "4"], 1), (["--tp", "4", "--sp"], 4), (["--cp", "2"], 2):
            parts = ask(capsys, "--recompute", "full", *arguments)["rank"]["parts"]
            assert parts["activations"]["layer_inputs"] == whole // ways == 32 * 4096**2 * 2 // ways

    def test_recomputation_and_attention(self, capsys: Any) -> None:
        flash = ask(capsys)["rank"]["activations_bytes"]
        unfused = ask(capsys, "--attention", "unfused")["rank"]["activations_bytes"]
        assert unfused - flash == 32 * 32 * 4096**2 * 2  # softmax's output
        selective = ["--attention", "unfused", "--recompute", "selective"]
        parts = ask(capsys, *selective)["rank"]["parts"]["activations"]
        assert sum(parts.values()) - parts.get("recomputed_layer", 0) == flash

    def test_kernels(self, capsys: Any) -> None:
        fused, eager = ask(capsys), ask(capsys, "--kernels", "eager")
        assert (fused["kernels"], eager["kernels"]) == ("fused", "eager")
        # A norm's float32 copy and its output for its input; SiLU's output besides.
        layer = 2 * 4096 * (4 + 2 - 2) + 2 * 14_336
        more = 4096 * (32 * layer + 4096 * (4 + 2 - 2))
        found = [answer["rank"]["activations_bytes"] for answer in (fused, eager)]
        assert found[1] - found[0] == more

    def test_pipeline_schedules(self, capsys: Any) -> None:
        def kept(*arguments: str) -> tuple[int, list[int]]:
            rank = ask(capsys, "--pp", "4", "--microbatches", "8", *arguments)["rank"]
            return rank["stage"], rank["microbatches_in_flight"]

        assert kept() == (0, [4])
        assert kept("--schedule", "afab")[1] == [8]
        stage, chunks = kept("--schedule", "interleaved_1f1b", "--virtual-stages", "2")
        assert stage == 0 and sum(chunks) == 2 * 3 + 4 + 1

    def test_experts(self, capsys: Any) -> None:
        expert, layers = 3 * 4096 * 14_336, 32
        one = ask(capsys, "--dp", "8", model="mixtral-8x7b")["rank"]["num_params"]
        spread = ask(capsys, "--dp", "8", "--ep", "8", model="mixtral-8x7b")["rank"]["num_params"]
        assert one - spread == 7 * layers * expert


class TestText:
    def test_names_what_was_asked_and_aligns_the_numbers(self, capsys: Any) -> None:
        arguments = ["--dp", "8", "--zero", "1", "--gpu", "h100-sxm"]
        assert main(["memory", "--model", "llama-3-8b", *arguments]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        lines = out.splitlines()
        assert lines[0].startswith("llama-3-8b: 8,030,261,248 parameters, 1 x 4,096 tokens, bf16")
        table = [line for line in lines if line.endswith(" GiB")]
        names = [line.split("  ")[0] for line in table]
        categories = ["params", "grads", "optimizer states", "activations"]
        assert names == [*categories, "total", "for a moment", "peak"]
        assert len({len(line) for line in table}) == 1
        assert len({line.index(" bytes") for line in table}) == 1
        assert table[0].split()[1:] == ["16,060,522,496", "bytes", "14.96", "GiB"]
        assert table[2].split()[2] == f"{12 * LLAMA // 8:,}"
        assert [line for line in lines if line.startswith("Not counted: CUDA context")]
        sizes = [int(line.split(" bytes")[0].split()[-1].replace(",", "")) for line in table[4:]]
        assert sizes[1] == 2 * 4 * 4096 * 128_256 and sizes[2] == sizes[0] + sizes[1]
        assert "For a moment: in the loss, the gradients of its log-probabilities" in out
        assert lines[-1] == "Fits h100-sxm (79.65 GiB): 15.58 GiB left."

    def test_says_that_selective_recomputation_has_nothing_to_do(self, capsys: Any) -> None:
        ask = ["memory", "--model", "llama-3-8b", "--recompute"]
        sentence = "Note: recompute selective has no effect with flash attention"
        assert main([*ask, "selective"]) == 0
        out = capsys.readouterr().out
        assert sentence in out and "flash attention, fused kernels" in out.splitlines()[0]
        for others in (["full"], ["selective", "--attention", "unfused", "--kernels", "eager"]):
            assert main([*ask, *others]) == 0
            out = capsys.readouterr().out
            assert sentence not in out
        assert "unfused attention, eager kernels" in out.splitlines()[0]
        assert main([*ask, "selective", "--json"]) == 0
        (note,) = json.loads(capsys.readouterr().out)["notes"]
        assert note.startswith("recompute selective has no effect")

    def test_says_which_stage_it_speaks_of_and_what_zero_3_gathers(self, capsys: Any) -> None:
        arguments = ["--pp", "4", "--dp", "2", "--zero", "3"]
        assert main(["memory", "--model", "llama-3-8b", *arguments]) == 0
        out = capsys.readouterr().out
        assert "pipeline stage 0 of 0 to 3 (needs most), 4 micro-batches kept" in out
        assert f"ZeRO-3 gathers up to {2 * HEAD / GIB:.4f} GiB" in out
        assert "Note: --zero=3 with pp" in out
        assert main(["memory", "--model", "llama-3-8b"]) == 0
        out = capsys.readouterr().out
        assert "the only pipeline stage" in out and "gathers" not in out and "Note" not in out


class TestExitStatus:
    def test_one_where_it_does_not_fit(self, capsys: Any) -> None:
        arguments = ["memory", "--model", "llama-3-8b", "--gpu", "H100"]
        assert main(arguments) == 1
        last = capsys.readouterr().out.splitlines()[-1]
        assert last == "Does not fit h100-sxm (79.65 GiB): 62.95 GiB missing."
        assert main([*arguments, "--json"]) == 1
        gpu = json.loads(capsys.readouterr().out)["gpu"]
        assert (gpu["name"], gpu["fits"]) == ("h100-sxm", False)
        assert gpu["left_bytes"] == gpu["memory_bytes"] - 148_908_343_296 - 8 * 4096 * 128_256

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--tp", "64"], "tp is 64 and must divide num_heads, 32"),
            (["--tp", "0"], "tp is 0"),
            (["--dp", "-1"], "dp is -1"),
            (["--ep", "2"], "ep"),
            (["--seq", "0"], "--seq is 0"),
            (["--microbatch", "0"], "--microbatch is 0"),
            (["--pp", "33"], "num_layers is 32"),
            (["--virtual-stages", "2"], "--virtual-stages is 2"),
            (["--gpu", "h900"], "no GPU is called 'h900'"),
            (["--model", "llama-3-9b"], "llama-3-8b"),
            (["--model", "nowhere/config.json"], "nowhere/config.json"),
        ],
    )
    def test_two_and_one_line_for_what_is_impossible(
        self, capsys: Any, arguments: list[str], words: str
    ) -> None:
        assert main(["memory", "--model", "llama-3-8b", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("playbook memory: ") and words in err
        assert err.count("\n") == 1

    @pytest.mark.parametrize(
        "arguments",
        [[], ["--model", "gpt2", "--recompute", "some"], ["--model", "gpt2", "--tp", "x"]],
    )
    def test_two_for_arguments_that_are_none(self, capsys: Any, arguments: list[str]) -> None:
        with pytest.raises(SystemExit) as stopped:
            main(["memory", *arguments])
        assert stopped.value.code == 2
        assert "playbook memory: error:" in capsys.readouterr().err


CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


class TestConfigFile:
    def test_is_read_and_what_is_not_understood_is_named(self, capsys: Any, tmp_path: Path) -> None:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**CONFIG, "brand_new_field": 1}))
        assert main(["memory", "--model", str(path), "--json"]) == 0
        out, err = capsys.readouterr()
        attention, mlp, norms = 2 * 256**2 + 2 * 256 * 128, 3 * 256 * 512, 2 * 256
        expected = 1000 * 256 + 3 * (attention + mlp + norms) + 256
        assert json.loads(out)["rank"]["num_params"] == expected
        assert err.startswith("playbook memory: warning:") and "brand_new_field" in err
        assert "rope" not in err
        path.write_text(json.dumps(CONFIG))
        assert main(["memory", "--model", str(tmp_path)]) == 0
        assert capsys.readouterr().err == ""

    @pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "bert"}'])
    def test_a_bad_one_is_one_line(self, capsys: Any, tmp_path: Path, text: str) -> None:
        path = tmp_path / "config.json"
        path.write_text(text)
        assert main(["memory", "--model", str(path)]) == 2
        err = capsys.readouterr().err
        assert err.startswith("playbook memory: ") and err.count("\n") == 1


def test_json_has_the_keys_that_programs_read(capsys: Any) -> None:
    found = ask(capsys, "--dp", "2", "--gpu", "b200")
    assert set(found) >= {
        *("model", "seq_len", "microbatch_size", "precision", "recompute", "attention"),
        "kernels",
        *("layout", "rank", "gpu", "not_counted", "notes"),
    }
    assert found["model"] == {"name": "llama-3-8b", "num_params": LLAMA, "ignored_fields": []}
    assert (found["layout"]["dp"], found["layout"]["world_size"]) == (2, 2)
    names = ("params", "grads", "optimizer_states", "activations")
    assert all(
        sum(found["rank"]["parts"][n].values()) == found["rank"][f"{n}_bytes"] for n in names
    )
    assert found["gpu"]["fits"] is True
    assert ask(capsys)["gpu"] is None


def test_nothing_heavy_is_imported() -> None:
    program = (
        "import sys; from playbook_utils.commands import main; main(['memory', '--model', 'gpt2', "
        "'--seq', '1024']); heavy = {'torch', 'numpy', 'matplotlib', 'IPython', 'ipywidgets'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.splitlines()[-1] == "[]"
