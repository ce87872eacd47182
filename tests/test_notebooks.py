"""`from notebooks.topic import Name`: what is read, what is refused, and what stays visible."""

from __future__ import annotations

import importlib
import inspect
import io
import linecache
import pdb
import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from playbook_utils import notebooks
from playbook_utils.errors import LaunchError, NotebookImportError, StaleNotebookError
from playbook_utils.notebooks.finder import NotebookFinder, find_folder

RING = '''#| export
import math

class Ring:
    """N ranks in a circle."""

    class Link:
        speed = 1

    def next(self, rank):
        return rank + 1
'''
STEPS = """#| export
LIMIT = 4 * 8

# how many
def num_steps(ring, world_size):
    if not isinstance(ring, Ring):
        raise TypeError(f"{ring!r} is no Ring")
    return 2 * (world_size - 1)
"""


def write_notebook(folder: Path, name: str, *cells: str) -> Path:
    """A notebook with a title, an empty code cell and these code cells."""
    parts = [new_markdown_cell("Hello\n# A ring"), new_code_cell("")]
    parts += [new_code_cell(cell) for cell in cells]
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(new_notebook(cells=parts), folder / name)
    return folder / name


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """An empty folder of notebooks, installed alone; what was installed before comes back."""
    finders = [f for f in sys.meta_path if isinstance(f, NotebookFinder)]
    modules = {n: m for n, m in sys.modules.items() if n.split(".")[0] == "notebooks"}
    for finder in finders:
        sys.meta_path.remove(finder)
    for name in modules:
        del sys.modules[name]
    notebooks.install(tmp_path / "notebooks")
    yield tmp_path / "notebooks"
    for name in [n for n in sys.modules if n.split(".")[0] == "notebooks"]:
        del sys.modules[name]
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, NotebookFinder)]
    sys.meta_path[:0] = finders
    sys.modules.update(modules)


@pytest.fixture
def ring(folder: Path) -> Path:
    """A notebook whose code cells 2 and 4 are exported."""
    return write_notebook(folder, "07_ring.ipynb", "x = launch()", RING, "%matplotlib", STEPS)


def test_only_exported_cells_are_read_and_share_one_namespace(ring: Path) -> None:
    from notebooks.ring import LIMIT, Ring, num_steps

    assert num_steps(Ring(), 4) == 6 and LIMIT == 32
    assert not hasattr(sys.modules["notebooks.ring"], "x")
    assert sys.modules["notebooks.ring"].__file__ == str(ring)


def test_an_exported_cell_may_import_from_another_notebook(ring: Path) -> None:
    cell = "#| export\nfrom notebooks.ring import Ring\nclass Two(Ring): pass"
    write_notebook(ring.parent, "08_two.ipynb", cell)
    from notebooks.two import Two

    assert Two().next(1) == 2
    assert set(notebooks.loaded_notebooks()) == {"notebooks.two", "notebooks.ring"}


def test_future_statements_hold_for_later_cells(folder: Path) -> None:
    first = "#| export\nfrom __future__ import annotations"
    write_notebook(folder, "01_a.ipynb", first, "#| export\ndef f(x: Unknown): pass")
    from notebooks.a import f

    assert f.__annotations__ == {"x": "Unknown"}


def test_sources_of_functions_and_classes_are_visible(ring: Path) -> None:
    from notebooks.ring import Ring, num_steps

    linecache.checkcache()
    assert inspect.getsource(num_steps) == STEPS[STEPS.index("def") :]
    assert inspect.getsource(Ring) == RING[RING.index("class Ring") :]
    assert inspect.getsource(Ring.next) == RING[RING.index("    def next") :]
    assert inspect.getsource(Ring.Link).strip().startswith("class Link")
    assert inspect.getcomments(num_steps) == "# how many\n"


def test_line_numbers_of_classes_are_those_of_the_whole_module(folder: Path) -> None:
    write_notebook(folder, "07_ring.ipynb", STEPS, RING)
    from notebooks.ring import Ring

    assert inspect.getsource(Ring) == RING[RING.index("class Ring") :]


def test_tracebacks_name_notebook_and_cell_and_show_the_line(ring: Path) -> None:
    from notebooks.ring import num_steps

    linecache.checkcache()
    with pytest.raises(TypeError) as caught:
        num_steps("circle", 4)
    text = "".join(traceback.format_exception(caught.value))
    assert 'File "<07_ring.ipynb, cell 4>", line 7, in num_steps' in text
    assert 'raise TypeError(f"{ring!r} is no Ring")' in text


def test_the_debugger_steps_into_exported_code(ring: Path) -> None:
    from notebooks.ring import Ring, num_steps

    commands = io.StringIO("next\nlist\nquit\n")
    shown = io.StringIO()
    debugger = pdb.Pdb(stdin=commands, stdout=shown, nosigint=True, readrc=False)
    debugger.runcall(num_steps, Ring(), 4)
    assert "<07_ring.ipynb, cell 4>(8)num_steps()" in shown.getvalue()
    assert "-> return 2 * (world_size - 1)" in shown.getvalue()
    assert "# how many" in shown.getvalue()


def test_definitions_are_pickled_by_reference(ring: Path) -> None:
    from notebooks.ring import Ring, num_steps

    for dumps in (pickle.dumps, cloudpickle.dumps):
        assert len(dumps((Ring, num_steps))) < 150
        assert pickle.loads(dumps((Ring, num_steps))) == (Ring, num_steps)


@pytest.mark.parametrize(
    "statement",
    [
        "import a.b as c, d",
        "from typing import (\n    Any,\n)",
        "async def f(): await g()",
        "@wraps(print)\ndef f(): print()",
        '"""Words."""',
        "...",
        "A, B = 1, -2.5",
        "C: int = 3 * A + 1",
        "D: int",
        'E = {"a": [1, 2], "b": (None, True)}',
        "F = torch.float32",
        "Pair = tuple[int, int] | None",
        'G = f"{A} ranks"',
        "square = lambda x: abs(x) ** 2",
        "if TYPE_CHECKING:\n    import torch",
        "if typing.TYPE_CHECKING:\n    import torch\nelse:\n    torch = None",
    ],
)
def test_defining_and_importing_is_allowed(folder: Path, statement: str) -> None:
    from playbook_utils.notebooks.cells import ExportedCell, parse_cell

    parse_cell(ExportedCell("01_a.ipynb", 3, f"#| export\n{statement}"))


@pytest.mark.parametrize(
    ("statement", "line"),
    [
        ("\nprint('hello')", 3),
        ("x = launch(train)", 2),
        ("x = [\n    1,\n    f(),\n]", 4),
        ("x: int = f()", 2),
        ("x = [i for i in y]", 2),
        ("x = (y := 1)", 2),
        ("x.y = 1", 2),
        ("x[0] = 1", 2),
        ("x += 1", 2),
        ("x", 2),
        ("for i in y: pass", 2),
        ("while True: pass", 2),
        ("if y: import z", 2),
        ("if TYPE_CHECKING:\n    f()", 3),
        ("with y: pass", 2),
        ("try: import z\nexcept ImportError: pass", 2),
        ("assert y", 2),
        ("del y", 2),
        ("def f(): pass\n%timeit f()", 3),
        ("!pip install torch", 2),
        ("    !ls", 2),
    ],
)
def test_doing_more_is_refused(folder: Path, statement: str, line: int) -> None:
    source = f"#| export\n{statement}"
    write_notebook(folder, "01_a.ipynb", "1", "2", source)
    offending = source.split("\n")[line - 1].strip()
    with pytest.raises(NotebookImportError) as caught:
        importlib.import_module("notebooks.a")
    assert f"01_a.ipynb, cell 3, line {line}: " in str(caught.value)
    assert f"\n    {offending}\n" in str(caught.value)
    assert "may only define and import" in str(caught.value)
    assert "notebooks.a" not in sys.modules and not notebooks.loaded_notebooks()


def test_a_refused_cell_runs_nothing_of_the_notebook(folder: Path, capsys) -> None:
    runs = "#| export\nclass A:\n    print('ran')"
    write_notebook(folder, "01_a.ipynb", runs, "#| export\nprint('ran')")
    with pytest.raises(NotebookImportError):
        importlib.import_module("notebooks.a")
    assert capsys.readouterr().out == ""


def test_syntax_errors_name_notebook_and_cell(folder: Path) -> None:
    write_notebook(folder, "01_a.ipynb", "1", "#| export\ndef f(:\n    pass")
    with pytest.raises(NotebookImportError, match=r"01_a.ipynb, cell 2, line 2: .*\n    def f\(:"):
        importlib.import_module("notebooks.a")


@pytest.mark.parametrize("text", ["{", "[]", '{"cells": [{"cell_type": "code"}]}', "\xff"])
def test_an_unreadable_file_is_named(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "01_a.ipynb").write_bytes(text.encode("latin-1"))
    with pytest.raises(NotebookImportError, match=r"01_a.ipynb cannot be read as a notebook"):
        importlib.import_module("notebooks.a")


def test_a_missing_notebook_lists_those_there(ring: Path) -> None:
    write_notebook(ring.parent, "02_memory.ipynb")
    write_notebook(ring.parent, "scratch.ipynb")
    for statement in ("import notebooks.rings", "from notebooks import rings"):
        with pytest.raises(NotebookImportError, match=r"no notebook NN_rings.*: memory, ring\."):
            exec(statement)


def test_two_notebooks_of_one_name_are_refused(ring: Path) -> None:
    write_notebook(ring.parent, "08_ring.ipynb")
    with pytest.raises(NotebookImportError, match=r"07_ring.ipynb and 08_ring.ipynb"):
        importlib.import_module("notebooks.ring")


def test_a_missing_name_gets_a_hint(ring: Path) -> None:
    with pytest.raises(ImportError, match=r"07_ring.ipynb exports no 'x': is the cell marked `#"):
        from notebooks.ring import x  # noqa: F401
    module = sys.modules["notebooks.ring"]
    with pytest.raises(AttributeError, match=r"It defines: Ring, num_steps"):
        _ = module.x
    assert getattr(module, "x", None) is None and not hasattr(module, "__path__")


def test_other_modules_are_left_alone(ring: Path) -> None:
    assert importlib.util.find_spec("notebooks_of_mine") is None
    assert importlib.util.find_spec("notebooks").submodule_search_locations == [str(ring.parent)]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("notebooks.ring.more")


@pytest.mark.parametrize("where", [".", "notebooks", "notebooks/deeper", "src/deep"])
def test_the_folder_is_found_from_the_working_directory_up(tmp_path: Path, where: str) -> None:
    write_notebook(tmp_path / "notebooks", "01_a.ipynb")
    (tmp_path / where).mkdir(parents=True, exist_ok=True)
    assert find_folder((tmp_path / where).resolve()) == tmp_path / "notebooks"


def test_a_folder_of_other_notebooks_does_not_count(tmp_path: Path) -> None:
    write_notebook(tmp_path / "course" / "notebooks", "01_a.ipynb")
    write_notebook(tmp_path / "course" / "work", "scratch.ipynb")
    found = find_folder(tmp_path / "course" / "work")
    assert found == tmp_path / "course" / "notebooks"


def test_installing_twice_changes_nothing_and_another_folder_starts_anew(ring: Path) -> None:
    first = importlib.import_module("notebooks.ring")
    notebooks.install()
    notebooks.install(ring.parent)
    assert sum(isinstance(f, NotebookFinder) for f in sys.meta_path) == 1
    assert importlib.import_module("notebooks.ring") is first

    other = write_notebook(ring.parent.parent / "other", "01_ring.ipynb", "#| export\nN = 1")
    notebooks.install(other.parent)
    assert notebooks.notebook_folder() == other.parent and notebooks.loaded_notebooks() == {}
    assert importlib.import_module("notebooks.ring").N == 1


def test_a_notebook_saved_since_the_kernel_read_it_is_stale(ring: Path) -> None:
    importlib.import_module("notebooks.ring")
    read = notebooks.loaded_notebooks()
    program = (
        "import sys; from playbook_utils import notebooks\n"
        "notebooks.install(sys.argv[1]); notebooks.expect_notebooks(eval(sys.argv[2]))\n"
        "from notebooks.ring import LIMIT; print(LIMIT)"
    )
    command = [sys.executable, "-c", program, str(ring.parent), repr(read)]

    write_notebook(ring.parent, ring.name, "other = text", RING, "more", STEPS)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "32\n", done.stderr

    write_notebook(ring.parent, ring.name, RING, STEPS.replace("4 * 8", "4 * 9"))
    done = subprocess.run(command, capture_output=True, text=True)
    message = "07_ring.ipynb was saved after this kernel read it: restart the kernel"
    assert "StaleNotebookError" in done.stderr and message in done.stderr


def test_expecting_another_text_than_was_read_is_stale(ring: Path) -> None:
    importlib.import_module("notebooks.ring")
    notebooks.expect_notebooks(notebooks.loaded_notebooks())
    with pytest.raises(StaleNotebookError, match=r"notebooks.ring differs"):
        notebooks.expect_notebooks({"notebooks.ring": "0" * 64})


def test_workers_import_what_the_kernel_read_or_refuse(folder: Path) -> None:
    cell = "#| export\nimport torch\ndef scaled(x):\n    return torch.tensor(x) * 2"
    path = write_notebook(folder, "07_scale.ipynb", cell)
    from notebooks.scale import scaled
    from playbook_utils.workers import launch, shutdown

    assert [int(result) for result in launch(scaled, 4, world_size=2)] == [8, 8]
    write_notebook(folder, path.name, cell.replace("* 2", "* 3"))
    with pytest.raises(LaunchError, match=r"07_scale.ipynb was saved after this kernel read it"):
        launch(scaled, 4, world_size=2)
    shutdown()


def test_a_class_body_that_runs_something_is_refused(folder: Path) -> None:
    write_notebook(folder, "07_run.ipynb", "#| export\nclass S:\n    print('runs')")
    with pytest.raises(NotebookImportError, match=r"07_run.ipynb, cell 1"):
        importlib.import_module("notebooks.run")


FOLDED = """Ours:

<details><summary>Ours</summary>

```python
#| export
def double(x):
    return 2 * missing
```

and one that stays here:

```python
def unmarked():
    pass
```

</details>
"""


def test_a_marked_fence_in_a_text_is_exported_in_its_place(folder: Path) -> None:
    cells = [
        new_code_cell("#| export\nmissing = 3"),
        new_markdown_cell(FOLDED),
        new_markdown_cell("```python\n#| export\nBASE = double\n```"),
        new_code_cell("#| export\nclass User:\n    double = BASE"),
    ]
    folder.mkdir(exist_ok=True)
    nbformat.write(new_notebook(cells=cells), folder / "07_folded.ipynb")
    module = importlib.import_module("notebooks.folded")
    assert module.User.double(4) == 6
    with pytest.raises(AttributeError, match="exports no 'unmarked'"):
        _ = module.unmarked
    assert inspect.getsource(module.double).startswith("def double(x)")
    del module.missing
    with pytest.raises(NameError) as error:
        module.double(4)
    (*_, frame) = traceback.extract_tb(error.value.__traceback__)
    assert frame.filename == "<07_folded.ipynb, answer 1 below cell 1>"
    assert (frame.lineno, frame.line) == (3, "return 2 * missing")


def test_a_marked_fence_may_only_define(folder: Path) -> None:
    cells = [new_code_cell("1"), new_markdown_cell("```python\n#| export\nprint(1)\n```")]
    folder.mkdir(exist_ok=True)
    nbformat.write(new_notebook(cells=cells), folder / "07_folded.ipynb")
    with pytest.raises(NotebookImportError, match="answer 1 below cell 1, line 2: a call"):
        importlib.import_module("notebooks.folded")
