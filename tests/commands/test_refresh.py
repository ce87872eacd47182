from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbval.plugin import get_sanitize_patterns

from playbook_utils.commands import main
from playbook_utils.commands.execution import Execution, execute
from playbook_utils.commands.refresh import (
    MASKS,
    OLDEST,
    as_bytes,
    difference,
    mask,
    normalise,
)
from tests.commands.tiny import write_notebook

CELLS = (
    "import sys, warnings\nprint('a')\nwarnings.warn('careful', stacklevel=1)\n"
    "print('b', file=sys.stderr)\nprint('c')\nobject()",
    "%matplotlib inline\nimport matplotlib.pyplot as plt\nprint('before')\nplt.plot([1, 2]);",
    "from tqdm import tqdm\nfor _ in tqdm(range(3)):\n    pass",
    "import os\nprint('pid', os.getpid())",
    "import ipywidgets\nipywidgets.interact(lambda x: print(x), x=3);",
    "for _ in range(3):\n    print(_, flush=True)\n    print(_, file=sys.stderr, flush=True)",
)


def refresh(folder: Path, *arguments: str) -> int:
    return main(["refresh", "--notebooks", str(folder), *arguments])


@pytest.fixture
def executed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes on the same instructions are not executed again: a kernel takes seconds."""
    done: dict[Any, Execution] = {}

    def once(path: Path, **how: Any) -> Execution:
        key = path.read_bytes(), str(how["environ"])
        done[key] = done[key] if key in done else execute(path, **how)
        return copy.deepcopy(done[key])

    monkeypatch.setattr("playbook_utils.commands.refresh.execute", once)


@pytest.mark.usefixtures("executed_once")
def test_same_bytes_on_every_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_notebook(tmp_path, "00_all", *CELLS)
    path.chmod(0o664)
    before = path.read_bytes()
    assert refresh(tmp_path, "--check") == 1
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    assert refresh(tmp_path) == 0
    first = path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o664
    assert refresh(tmp_path, "--check") == 0
    assert path.read_bytes() == first
    reports = capsys.readouterr().out.splitlines()
    assert reports == [f"00_all: {r}" for r in ("would change", "written", "unchanged")]

    notebook = json.loads(first)
    assert [cell["execution_count"] for cell in notebook["cells"]] == [1, 2, 3, 4, 5, 6]
    assert [cell["id"] for cell in notebook["cells"]] == [f"c{i:02d}" for i in range(6)]
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    outputs = [cell["outputs"] for cell in notebook["cells"]]
    assert [o.get("name") for o in outputs[0]] == ["stdout", "stderr", None]
    assert outputs[0][0]["text"] == ["a\n", "c\n"]
    assert outputs[0][1]["text"][0] == "<cell>:3: UserWarning: careful\n"
    assert outputs[0][2]["data"]["text/plain"] == ["<object at 0x...>"]
    assert "image/png" in outputs[1][1]["data"]
    assert outputs[2][0]["text"][-1].endswith("3/3 [...]\n")
    assert outputs[3][0]["text"] == ["pid ...\n"]
    assert [list(o["data"]) for o in outputs[4]] == [["text/plain"]]
    assert [o["text"] for o in outputs[5]] == [["0\n", "1\n", "2\n"]] * 2


def test_failed_lesson_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_notebook(tmp_path, "00_bad", "print(1)", "1 / 0")
    before = path.read_bytes()
    assert refresh(tmp_path) == 1
    assert path.read_bytes() == before
    printed = capsys.readouterr()
    assert "00_bad: failed at cell [2], not written" in printed.out
    assert "00_bad, cell [2]: ZeroDivisionError" in printed.err


@pytest.mark.usefixtures("executed_once")
def test_outputs_that_depend_on_the_processor_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "print('start')\nprint('a sum of', os.environ.get('ATEN_CPU_CAPABILITY', 'newest'))"
    path = write_notebook(tmp_path, "00_sum", "import os", "", line)
    before = path.read_bytes()
    for arguments in ((), ("--check",)):
        assert refresh(tmp_path, *arguments) == 1
        assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
        printed = capsys.readouterr().out
        assert "00_sum: failed: cell [2] gives stdout 'a sum of newest' with the newest" in printed
        assert "stdout 'a sum of default' with the oldest (round it" in printed

    tag(path, 2, "nbval-ignore-output")
    assert refresh(tmp_path) == 0
    assert "a sum of newest" in path.read_text()


def test_what_fails_on_an_older_processor_only_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_notebook(tmp_path, "00_bad", "import os\nassert 'MKL_CBWR' not in os.environ")
    before = path.read_bytes()
    assert refresh(tmp_path) == 1
    assert path.read_bytes() == before
    said = "00_bad: failed at cell [1] with the oldest instructions, not written"
    assert said in capsys.readouterr().out


def test_the_oldest_instructions_are_pytorchs_oldest() -> None:
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    command, environ = [sys.executable, "-c", code], os.environ | OLDEST
    assert subprocess.check_output(command, env=environ, text=True).strip() == "DEFAULT"


def tag(path: Path, cell: int, name: str) -> None:
    notebook = nbformat.read(str(path), as_version=4)
    notebook.cells[cell].metadata["tags"] = [name]
    nbformat.write(notebook, str(path))


def output(**changes: Any) -> Any:
    return nbformat.v4.new_output("display_data", data=changes)


STREAM = [nbformat.v4.new_output("stream", name="stdout", text="one\ntwo\n")]
LONG = "x" * 500
OUTPUTS: dict[str, tuple[list[Any], list[Any], str]] = {
    "a line": (
        STREAM,
        [nbformat.v4.new_output("stream", name="stdout", text="one\nTWO\n")],
        "cell [1] gives stdout 'two' with the newest instructions and stdout 'TWO' with",
    ),
    "another stream": (
        STREAM,
        [nbformat.v4.new_output("stream", name="stderr", text="one\ntwo\n")],
        "gives stdout 'one' with the newest instructions and stderr 'one' with",
    ),
    "less": (STREAM, [], "and no more '' with the oldest"),
    "more": ([], STREAM, "gives no more '' with the newest"),
    "far along a line": (
        [output(**{"text/html": f"{LONG}1{LONG}"})],
        [output(**{"text/html": f"{LONG}2{LONG}"})],
        f"gives text/html '{'x' * 30}1{'x' * 49}' with",
    ),
    "an error": (
        [nbformat.v4.new_output("error", ename="E", evalue="0.1", traceback=["a"])],
        [nbformat.v4.new_output("error", ename="E", evalue="0.2", traceback=["a"])],
        "gives error 'E: 0.1' with",
    ),
    "JSON": (
        [output(**{"application/json": {"a": 1}})],
        [output(**{"application/json": {"a": 2}})],
        "application/json '{\"a\": 1}' with",
    ),
    "a pixel": ([output(**{"image/png": "1"})], [output(**{"image/png": "2"})], ""),
    "a traceback": (
        [nbformat.v4.new_output("error", ename="E", evalue="0.1", traceback=["a"])],
        [nbformat.v4.new_output("error", ename="E", evalue="0.1", traceback=["b"])],
        "",
    ),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_difference(case: str) -> None:
    newest, oldest, says = OUTPUTS[case]
    runs = [
        nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell("1", execution_count=1, outputs=outputs)]
        )
        for outputs in (newest, oldest)
    ]
    found = difference(*runs)
    assert bool(found) == bool(says)
    assert says in found and len(found) < 400


def test_normalise_keeps_what_authors_wrote_and_drops_the_rest() -> None:
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_markdown_cell("# T", metadata={"collapsed": True})]
    )
    code = nbformat.v4.new_code_cell("1", execution_count=9)
    code.metadata = {
        "tags": ["solution"],
        "jupyter": {"source_hidden": True},
        "execution": {"t": 1},
    }
    notebook.cells.append(code)
    del notebook.cells[0]["id"]
    notebook.metadata = {"widgets": {"x": {}}, "kernelspec": {"name": "venv"}, "toc": 1}
    clean = normalise(notebook)
    assert clean.cells[0].id == "cell-000"
    assert clean.cells[0].metadata == {}
    assert clean.cells[1].id == code.id
    assert clean.cells[1].metadata == {"tags": ["solution"], "jupyter": {"source_hidden": True}}
    assert clean.cells[1].execution_count == 1
    assert set(clean.metadata) == {"kernelspec", "language_info"}
    assert as_bytes(clean) == as_bytes(normalise(clean)), "normalising twice changes nothing more"
    assert notebook.cells[1].execution_count == 9, "the argument is left alone"


TEXTS = {
    "/tmp/ipykernel_71/2850.py:3: UserWarning: x": "<cell>:3: UserWarning: x",
    "in /home/me/.venv/lib/python3.12/site-packages/torch/x.py:3": "in site-packages/torch/x.py:3",
    "<f at 0x7f00aabbccdd>": "<f at 0x...>",
    "pid 4711, PID=12": "pid ..., PID=...",
    "100%|##| 3/3 [00:02<00:00,  1.93it/s]": "100%|##| 3/3 [...]",
    "0x10 rapid 3 [1, 2] 5 min": "0x10 rapid 3 [1, 2] 5 min",
}


@pytest.mark.parametrize("text", TEXTS)
def test_mask(text: str) -> None:
    assert mask(text) == TEXTS[text]
    assert mask(mask(text)) == mask(text)


def test_nbval_masks_the_same() -> None:
    config = Path(__file__).parents[1] / "sanitize.cfg"
    assert dict(get_sanitize_patterns(config.read_text())) == MASKS


def test_what_was_saved_meanwhile_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit = "text = pathlib.Path('00_all.ipynb').read_text()\n"
    edit += "pathlib.Path('00_all.ipynb').write_text(text + ' ')"
    path = write_notebook(tmp_path, "00_all", "import pathlib", edit)
    assert refresh(tmp_path) == 1
    assert "saved by someone else meanwhile, not written" in capsys.readouterr().out
    assert path.read_text().endswith(" ") and len(list(tmp_path.glob("*"))) == 1
