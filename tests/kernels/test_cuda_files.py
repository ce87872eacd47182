"""What every file of kernels/cuda promises its reader."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernels.resources import _main, cuda_files
from kernels.source import read_source

SECTIONS = ("Launch:", "Counts:", "Read:")


def test_the_ladder_has_no_gap() -> None:
    assert [path.name[:3] for path in cuda_files()] == [f"{n:02}_" for n in range(1, 13)]


@pytest.mark.parametrize("path", cuda_files(), ids=lambda path: path.stem)
def test_the_comment_at_the_top_says_how_to_launch_it(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("/* ")
    comment = text[: text.index("*/")]
    summary, blank, *_ = comment.splitlines()
    assert summary.endswith((".", "C = A B.")) and blank == ""
    for section in SECTIONS:
        assert f"\n{section}" in comment
    for number, line in enumerate(text.splitlines(), start=1):
        assert len(line) <= 88 and line == line.rstrip(), f"{path.name}:{number}"


@pytest.mark.parametrize("path", cuda_files(), ids=lambda path: path.stem)
def test_inputs_come_first_then_outputs_then_numbers(path: Path) -> None:
    for signature in read_source(path, None).kernels.values():
        kinds = [(not p.pointer, not p.const and p.pointer) for p in signature.parameters]
        assert kinds == sorted(kinds), str(signature)
        assert signature.parameters[-1].type == "int"


@pytest.mark.parametrize("path", cuda_files(), ids=lambda path: path.stem)
def test_constants_can_be_overridden_and_there_is_no_host_code(path: Path) -> None:
    text = path.read_text()
    for name in re.findall(r"^#define (\w+) \d+$", text, flags=re.MULTILINE):
        assert f"#ifndef {name}\n#define {name} " in text
    assert "<<<" not in text and "#include" not in text


def test_the_matmul_files_share_one_signature() -> None:
    files = [path for path in cuda_files() if "matmul" in path.name]
    signatures = {
        str(s).split("(")[1] for f in files for s in read_source(f, None).kernels.values()
    }
    assert len(files) == 6
    assert signatures == {"const float* a, const float* b, float* c, int M, int N, int K)"}


def test_without_nvcc_the_table_says_so_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert _main() == 0
    assert capsys.readouterr().out == "nvcc was not found on PATH: no registers are shown\n"
