"""A lesson's exercises from outside: its cells by name, run, and broken on purpose.

    lesson = Lesson.read("00_start_here")
    names = lesson.setup()                              # what the first code cell defines
    run_cell(lesson.stub("gpus_needed"), names).status        # "not solved yet"
    run_cell(lesson.solution("gpus_needed"), names).status    # "passed"
    broken = plant(lesson.solution("gpus_needed"), "16 *", "2 *")
    run_cell(broken, names).status                            # "failed"

and the tests that every lesson's exercises pass, `ThreeWays`:

    class TestExercises(ThreeWays):
        lesson = LESSON
        bugs = {"weights only": ("gpus_needed", "16 *", "2 *", "16 bytes a parameter")}

Left out: lesson-specific bugs and messages, which stand in `test_exercises_<topic>.py`.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import linecache
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import nbformat
import pytest

import playbook_utils  # noqa: F401 (makes `notebooks` importable, as in a lesson)
from playbook_utils.checks import CheckResult
from playbook_utils.notebooks.cells import fences
from playbook_utils.workers import shutdown

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
_NUMBERS = itertools.count(1)
_DETAILS = re.compile(r"<details>.*?</details>", re.DOTALL)


@dataclass(frozen=True)
class Lesson:
    """The code cells of one notebook, and the answers folded into its text."""

    name: str
    cells: tuple[Any, ...]
    folded: tuple[str, ...]
    """Python in `<details>`, in order."""

    @classmethod
    def read(cls, name: str) -> Lesson:
        """The lesson of this file name, without its ending."""
        notebook = nbformat.read(str(NOTEBOOKS / f"{name}.ipynb"), as_version=4)
        texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
        details = [part for text in texts for part in _DETAILS.findall(text)]
        return cls(
            name,
            tuple(cell for cell in notebook.cells if cell.cell_type == "code"),
            tuple(source for part in details for source in fences(part)),
        )

    def stub(self, function: str) -> str:
        """The cell that asks for `function`: it defines it, raises, and checks it."""
        (source,) = [s for s in self._defining(function, solution=False) if "check(" in s]
        assert "raise NotImplementedError(" in source, f"{function} is no stub:\n{source}"
        return source

    def solution(self, function: str) -> str:
        """The folded answer that defines `function`, and the stub's own call of `check`.

        In a lesson of the old form: the cell tagged "solution".
        """
        answers = [source for source in self.folded if function in _defined(source)]
        if not answers:
            (source,) = self._defining(function, solution=True)
            return source
        (answer,) = answers
        (call,) = re.findall(r"^check\(.*\Z", self.stub(function), re.MULTILINE | re.DOTALL)
        return f"{answer}\n\n\n{call}"

    def unfolded_solutions(self) -> list[str]:
        """Ids of the solution cells that a reader would see without opening them."""
        return [
            cell.id
            for cell in self.cells
            if "solution" in cell.metadata.get("tags", [])
            and not cell.metadata.get("jupyter", {}).get("source_hidden")
        ]

    def exercises(self) -> list[str]:
        """Names of all functions that the lesson asks for, in order."""
        stubs = [c.source for c in self.cells if "raise NotImplementedError(" in c.source]
        return [name for source in stubs for name in _defined(source)]

    def setup(self) -> dict[str, Any]:
        """What the first code cell defines, what all others import, and what the lesson exports."""
        names = {"__name__": "__main__"}  # so that functions travel to workers by value
        exec(compile(self.cells[0].source, f"<{self.name}, setup>", "exec"), names)
        for source in self._imports():
            exec(compile(source, f"<{self.name}, import>", "exec"), names)
        if self.folded:
            exported = vars(importlib.import_module(f"notebooks.{self.name[3:]}"))
            names |= {name: value for name, value in exported.items() if name[:2] != "__"}
        return names

    def _imports(self) -> list[str]:
        kinds = (ast.Import, ast.ImportFrom)
        cells = [c.source for c in self.cells[1:] if not c.source.startswith(("%", "!"))]
        found = [node for source in cells for node in ast.parse(source).body]
        return [ast.unparse(node) for node in found if isinstance(node, kinds)]

    def _defining(self, function: str, *, solution: bool) -> list[str]:
        return [
            cell.source
            for cell in self.cells
            if ("solution" in cell.metadata.get("tags", [])) == solution
            and function in _defined(cell.source)
        ]


class ThreeWays:
    """Tests of a lesson's exercises: stub -> not solved yet, solution -> passed, bugs -> failed.

    A subclass names its lesson and, for each bug, (function, what stands in the solution, what
    is put in its place, a part of what the check then says). Two bugs at least for each exercise.
    """

    lesson: ClassVar[Lesson]
    bugs: ClassVar[dict[str, tuple[str, str, str, str]]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        values = {"function": self.lesson.exercises(), "bug": list(self.bugs)}
        for name, cases in values.items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, cases)

    @pytest.fixture(scope="class")
    @classmethod
    def names(cls) -> Any:
        """What the first code cell and the first exercise's imports define."""
        names = cls.lesson.setup()
        stub = cls.lesson.stub(cls.lesson.exercises()[0])
        exec(re.split(r"^(?:def|class) ", stub, flags=re.MULTILINE)[0], names)
        yield names
        shutdown()

    def test_solutions_are_folded(self) -> None:
        assert self.lesson.unfolded_solutions() == []

    def test_every_exercise_has_two_bugs(self) -> None:
        planted = [function for function, *_ in self.bugs.values()]
        assert len(self.lesson.exercises()) >= 3
        assert [f for f in self.lesson.exercises() if planted.count(f) < 2] == []
        assert set(planted) == set(self.lesson.exercises())

    def test_stub_is_not_solved_yet(self, function: str, names: dict[str, Any]) -> None:
        result = run_cell(self.lesson.stub(function), names)
        assert result.status == "not solved yet", result.text
        assert len(result.text) > len("not solved yet: ") + 10

    def test_solution_passes(self, function: str, names: dict[str, Any]) -> None:
        result = run_cell(self.lesson.solution(function), names)
        assert result.text == f"passed: {function}"

    def test_planted_bug_fails_and_is_explained(self, bug: str, names: dict[str, Any]) -> None:
        function, old, new, fragment = self.bugs[bug]
        result = run_cell(plant(self.lesson.solution(function), old, new), names)
        assert result.status == "failed", result.text
        assert fragment in result.text
        assert "hint: " in result.text


def run_cell(source: str, names: dict[str, Any]) -> CheckResult:
    """Run a cell that ends with a `check(...)` in a copy of `names`; its verdict."""
    filename = f"<exercise {next(_NUMBERS)}>"
    # As IPython does: the check tells a stub by its source line.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    *body, last = ast.parse(source, filename).body
    assert isinstance(last, ast.Expr), f"the cell does not end with check(...):\n{source}"
    names = dict(names)
    exec(compile(ast.Module(body, type_ignores=[]), filename, "exec"), names)
    result = eval(compile(ast.Expression(last.value), filename, "eval"), names)
    assert isinstance(result, CheckResult), f"the cell does not end with check(...):\n{source}"
    return result


def plant(source: str, old: str, new: str) -> str:
    """The source with a bug: `old`, which must stand there, becomes `new`."""
    assert source.count(old) >= 1, f"{old!r} is not in the solution any more:\n{source}"
    assert old != new
    return source.replace(old, new)


def _defined(source: str) -> list[str]:
    """Names of the functions and classes that a cell defines at its top."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [node.name for node in ast.parse(source).body if isinstance(node, kinds)]
