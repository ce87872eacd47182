from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
from nbval.plugin import get_sanitize_patterns

from playbook_utils.commands import main
from playbook_utils.commands.refresh import MASKS, as_bytes, mask, normalise
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


def test_same_bytes_on_every_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_notebook(tmp_path, "00_all", *CELLS)
    assert refresh(tmp_path, "--check") == 1
    assert refresh(tmp_path) == 0
    first = path.read_bytes()
    assert refresh(tmp_path) == 0
    assert path.read_bytes() == first
    assert refresh(tmp_path, "--check") == 0
    reports = capsys.readouterr().out.splitlines()
    assert reports == [
        f"00_all: {r}" for r in ("would change", "written", "unchanged", "unchanged")
    ]

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


def test_check_writes_nothing(tmp_path: Path) -> None:
    path = write_notebook(tmp_path, "00_new", "print(1)")
    before = path.read_bytes()
    assert refresh(tmp_path, "--check") == 1
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


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


def test_permissions_are_kept(tmp_path: Path) -> None:
    path = write_notebook(tmp_path, "00_all", "print(1)")
    path.chmod(0o664)
    assert refresh(tmp_path) == 0
    assert path.stat().st_mode & 0o777 == 0o664
