"""A notebook's exported cells as one script that needs no notebook."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import playbook_utils.notebooks
from playbook_utils.notebooks import export_script

BASE = '''#| export
from __future__ import annotations
import math

SCALE = 2
UNUSED = 5

# why half
def half(x):
    """Half of x."""
    return x / SCALE

def double(x: Unknown) -> Unknown:
    return math.prod((SCALE, x))

def main():
    raise AssertionError("the main of another notebook")
'''
MIDDLE = """#| export
from notebooks.base import (
    half,
)

def quarter(x):
    from notebooks.base import double as twice
    return half(x) / twice(1)
"""
TOP = '''#| export
"""Words."""
from notebooks.middle import quarter as fourth
from notebooks.base import half  # again

def main():
    print("result", fourth(16), half(2))
'''


def write_notebook(folder: Path, name: str, *cells: str, title: str = "A title") -> Path:
    """Plain JSON, as little of it as a notebook needs."""
    import json

    document = [{"cell_type": "markdown", "source": [f"# {title}\n", "words"]}]
    document += [{"cell_type": "code", "source": cell.splitlines(True)} for cell in cells]
    (folder / name).write_text(json.dumps({"cells": document}))
    return folder / name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three notebooks; the third imports from the second, and both from the first."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    write_notebook(folder, "01_base.ipynb", "print('not exported')", BASE)
    write_notebook(folder, "02_middle.ipynb", MIDDLE)
    write_notebook(folder, "03_top.ipynb", TOP, "main()", title='Say """hi""" \\ "now"')
    return folder


def run_script(text: str, folder: Path) -> str:
    """Run in a fresh process that can import the package and no notebook."""
    path = folder / "script.py"
    path.write_text(text)
    package = Path(playbook_utils.notebooks.__file__).parents[2]
    program = "import runpy, sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Notebook' not in"
    program += " type(f).__name__]; runpy.run_path(sys.argv[1], run_name='__main__')"
    environment = {"PYTHONPATH": str(package), "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_imports_from_notebooks_are_written_into_the_script(folder: Path, tmp_path: Path) -> None:
    text = export_script(folder / "03_top.ipynb")
    assert run_script(text, tmp_path) == "result 4.0 1.0\n"
    assert "notebooks." not in text.split("\n\n", 3)[3]
    assert text.index("def half") < text.index("def quarter") < text.index("def main")


def test_only_what_is_used_is_taken_from_other_notebooks(folder: Path) -> None:
    text = export_script(folder / "03_top.ipynb")
    assert text.count("def main") == 1 and text.count("def half") == 1
    assert "UNUSED" not in text and "not exported" not in text
    assert "# why half\ndef half" in text


def test_the_script_says_what_it_is(folder: Path) -> None:
    text = export_script(folder / "03_top.ipynb")
    compile(text, "script.py", "exec")
    namespace: dict[str, object] = {"__name__": "script"}
    exec(text, namespace)
    first, *rest = str(namespace["__doc__"]).split("\n")
    assert first == "Say '''hi''' \\ \"now"
    assert "    torchrun --nproc-per-node 4 top.py" in rest


def test_without_main_it_prints_what_it_defines(folder: Path, tmp_path: Path) -> None:
    assert run_script(export_script(folder / "02_middle.ipynb"), tmp_path) == "Defines: quarter\n"


def test_main_can_be_named(folder: Path, tmp_path: Path) -> None:
    cell = "#| export\ndef hello():\n    print('hello')\n\n\ndef main():\n    print('main')"
    path = write_notebook(folder, "04_hello.ipynb", cell)
    assert run_script(export_script(path, main="hello"), tmp_path) == "hello\n"
    with pytest.raises(ValueError, match="exports no 'bye'; it exports: hello, main"):
        export_script(path, main="bye")


@pytest.mark.parametrize("name", ["02", "2", "middle", "02_middle", "02_middle.ipynb"])
def test_a_notebook_is_found_by_number_and_topic(folder: Path, monkeypatch, name: str) -> None:
    import playbook_utils.notebooks.script as script

    monkeypatch.setattr(script, "notebook_folder", lambda: folder)
    assert "def quarter" in export_script(name)
    with pytest.raises(ValueError, match=r"'5'; there are: 01_base.ipynb, 02_middle.ipynb"):
        export_script("5")


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (
            "from notebooks.base import half\ndef half(x): pass",
            "'half' is defined in 01_base.ipynb",
        ),
        ("from notebooks.base import half as min2\ndef min2(): pass", "'min2' is defined in"),
        ("from notebooks.base import double\nfrom os import path as math", "'math' is defined in"),
        ("from notebooks.base import *", "04_new.ipynb, cell 1: name what you import"),
        ("import notebooks.base", "write `from notebooks.topic import Name`"),
        ("from notebooks import base", "write `from notebooks.topic import Name`"),
        ("from notebooks.nothing import x", "there is no notebook NN_nothing.ipynb"),
        ("from notebooks.base import x", "01_base.ipynb exports no x"),
        ("x = 1; y = 2", "line 2: put one statement on a line"),
        ("from notebooks.new import f", "04_new.ipynb -> 04_new.ipynb import each other"),
    ],
)
def test_what_cannot_be_one_script_is_refused(folder: Path, cell: str, message: str) -> None:
    path = write_notebook(folder, "04_new.ipynb", f"#| export\n{cell}\ndef f(): pass")
    with pytest.raises(ValueError, match=message.replace("*", r"\*")):
        export_script(path)


def test_the_same_import_in_two_notebooks_is_no_conflict(folder: Path, tmp_path: Path) -> None:
    cell = (
        "#| export\nimport math\nfrom notebooks.base import double\ndef main():\n    print(math.pi"
    )
    path = write_notebook(folder, "04_new.ipynb", cell + ", double(2))")
    assert run_script(export_script(path), tmp_path).endswith(" 4\n")


def test_torchrun_runs_the_script_on_every_rank(folder: Path, tmp_path: Path) -> None:
    cell = """#| export
import torch
import torch.distributed as dist
from notebooks.base import double
from playbook_utils.workers import launch

def total():
    rank_sum = torch.tensor(double(dist.get_rank() + 1))
    dist.all_reduce(rank_sum)
    return int(rank_sum)

def main():
    print("totals", launch(total, world_size=2))
"""
    text = export_script(write_notebook(folder, "04_total.ipynb", cell))
    (tmp_path / "total.py").write_text(text)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *torchrun, "total.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "totals [6, 6]" in done.stdout


def test_a_notebook_without_exports_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"04_new\.ipynb exports nothing"):
        export_script(write_notebook(folder, "04_new.ipynb", "def f(): pass"))
