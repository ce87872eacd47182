"""The import of `notebooks.topic`: a finder on `sys.meta_path`.

What was read, and what a worker must read, is kept by the finder itself; the functions here look
it up on `sys.meta_path`.

    install()                                   # import playbook_utils has done it
    from notebooks.data_parallelism import BucketedDDP

    in the kernel:  read, folder = loaded_notebooks(), notebook_folder()
    in a worker:    install(folder); expect_notebooks(read)
"""

from __future__ import annotations
import __future__

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import opcode
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

from playbook_utils.errors import NotebookImportError, StaleNotebookError
from playbook_utils.notebooks.cells import Notebook, find_notebooks, parse_cell, read_notebook

__all__ = [
    "NotebookFinder", "expect_notebooks", "find_folder", "install", "loaded_notebooks",
    "notebook_folder",
]  # fmt: skip

_PACKAGE = "notebooks"
_FEATURES = [getattr(__future__, name) for name in __future__.all_feature_names]
_FUTURE_FLAGS = sum(feature.compiler_flag for feature in _FEATURES)


class NotebookFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `notebooks` and `notebooks.topic` in one folder of notebooks, and makes the modules."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self.loaded: dict[str, str] = {}
        """{module name: digest of the exported source that it was made from}."""
        self.expected: dict[str, str] = {}
        """{module name: digest that an import must find}."""

    @property
    def folder(self) -> Path | None:
        """The folder in use; searched for on first need, then kept for the whole process."""
        if self._folder is None:
            self._folder = find_folder(Path.cwd())
        return self._folder

    def use(self, folder: Path) -> None:
        """Read from `folder` from now on; modules of another folder are forgotten."""
        if self._folder is not None and folder != self._folder:
            for name in [*self.loaded, _PACKAGE]:
                sys.modules.pop(name, None)
            self.loaded.clear()
            self.expected.clear()
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Answer for `notebooks` and `notebooks.topic`; for nothing where there is no folder."""
        package, _, topic = fullname.partition(".")
        if package != _PACKAGE or "." in topic or self.folder is None:
            return None
        if not topic:
            spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [str(self.folder)]
            return spec
        file = _file(topic, self.folder)
        return importlib.util.spec_from_file_location(fullname, file, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        """Run the exported cells in the module's namespace, in order.

        Raises NotebookImportError (bad cell, unreadable file) or StaleNotebookError (not the
        notebook that the kernel read).
        """
        notebook = read_notebook(Path(str(module.__file__)))
        if self.expected.get(module.__name__, notebook.digest) != notebook.digest:
            raise StaleNotebookError(
                f"{notebook.path.name} was saved after this kernel read it: restart the kernel. "
                "(The workers would run other code than the notebook that started them.)"
            )
        trees = [parse_cell(cell) for cell in notebook.cells]
        # A class is looked up by its module's file, a function by its code's file: both are known.
        _register_source(str(notebook.path), notebook.source)
        flags, lines_before = 0, 0
        for cell, tree in zip(notebook.cells, trees, strict=True):
            _register_source(cell.filename, cell.source)
            code = compile(tree, cell.filename, "exec", flags=flags, dont_inherit=True)
            # As in a live notebook, `from __future__` holds for the cells below, too.
            flags |= code.co_flags & _FUTURE_FLAGS
            exec(code, module.__dict__)
            # Since Python 3.13 inspect takes a class's line from the class and its text from the
            # module's file; the cell was compiled with lines of its own.
            for name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}:
                _shift_class(vars(module).get(name), module.__name__, lines_before)
            lines_before += cell.source.count("\n") + 2
        self.loaded[module.__name__] = notebook.digest
        module.__dict__["__getattr__"] = partial(_missing_name, module.__name__, notebook, trees)


def _file(topic: str, folder: Path) -> Path:
    there = find_notebooks(folder)
    files = there.get(topic, [])
    if len(files) == 1:
        return files[0]
    if files:
        names = " and ".join(file.name for file in files)
        raise NotebookImportError(
            f"notebooks.{topic} could be {names}: rename or delete one of them. Folder: {folder}"
        )
    raise NotebookImportError(
        f"there is no notebook NN_{topic}.ipynb. These can be imported from (the number is "
        f"left out): {', '.join(there) or 'none'}. Folder: {folder}"
    )


def _missing_name(
    module_name: str, notebook: Notebook, trees: list[ast.Module], name: str
) -> object:
    """A module's `__getattr__`: says what the notebook exports."""
    message = f"module {module_name!r} has no attribute {name!r}"
    if name.startswith("__"):
        raise AttributeError(message)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    defined = [node.name for tree in trees for node in tree.body if isinstance(node, kinds)]
    hint = (
        f"{notebook.path.name} exports no {name!r}: is the cell marked `#| export` in its first "
        f"line, and the notebook saved? It defines: {', '.join(defined) or 'nothing'}"
    )
    # `from m import x` turns an AttributeError into an ImportError without its text, while
    # hasattr() and pickle need AttributeError: only that statement gets an ImportError.
    caller = sys._getframe(1)
    if caller.f_code.co_code[caller.f_lasti] == opcode.opmap["IMPORT_FROM"]:
        raise NotebookImportError(hint, name=module_name)
    raise AttributeError(f"{message}. {hint}")


def _register_source(filename: str, source: str) -> None:
    # No modification time: linecache.checkcache() then never looks at the disk and keeps it.
    lines = [line + "\n" for line in source.split("\n")]
    linecache.cache[filename] = (len(source), None, lines, filename)


def _shift_class(defined: object, module_name: str, lines_before: int) -> None:
    """Move a class that this module defines, and the classes inside it."""
    if not isinstance(defined, type) or defined.__module__ != module_name:
        return
    first_line = defined.__dict__.get("__firstlineno__")
    if first_line is not None:
        type.__setattr__(defined, "__firstlineno__", first_line + lines_before)
    for inner in vars(defined).values():
        nested = getattr(inner, "__qualname__", "").startswith(f"{defined.__qualname__}.")
        if isinstance(inner, type) and nested:
            _shift_class(inner, module_name, lines_before)


def find_folder(start: Path) -> Path | None:
    """The folder of notebooks: `start`, else a `notebooks/` in it or above, else the checkout's.

    A folder counts when it holds an `NN_topic.ipynb`. None where there is none.
    """
    checkout = Path(__file__).resolve().parents[2]
    above = [folder / _PACKAGE for folder in (start, *start.parents)]
    candidates = [start, *above, checkout / _PACKAGE]
    return next((folder for folder in candidates if find_notebooks(folder)), None)


def install(folder: str | Path | None = None) -> None:
    """Let `from notebooks.topic import Name` work in this process; safe to repeat.

    folder: where the notebooks are. Without it, the folder is searched for at the first import of
    a notebook: see `find_folder`. Another folder than before replaces it, and its modules are
    imported anew.
    """
    finder = _installed()
    if finder is None:
        finder = NotebookFinder()
        # First, so that an exported script left beside the notebooks cannot stand in for one.
        sys.meta_path.insert(0, finder)
    if folder is not None:
        finder.use(Path(folder).resolve())


def loaded_notebooks() -> dict[str, str]:
    """{module name: SHA-256 of its exported source, as this process read it}."""
    finder = _installed()
    return dict(finder.loaded) if finder else {}


def notebook_folder() -> Path | None:
    """The folder that `notebooks.topic` is read from; None where there is none."""
    finder = _installed()
    return finder.folder if finder else find_folder(Path.cwd())


def expect_notebooks(read: Mapping[str, str]) -> None:
    """Hold the imports of this process to what another one read (its `loaded_notebooks()`).

    Importing a notebook whose exported source has changed since then raises StaleNotebookError,
    and so does this call where one is imported already.
    """
    install()
    finder = _installed()
    assert finder is not None
    finder.expected.update(read)
    for module_name in set(finder.loaded) & set(read):
        if finder.loaded[module_name] != read[module_name]:
            raise StaleNotebookError(
                f"{module_name} differs between the kernel and this process: restart the kernel."
            )


def _installed() -> NotebookFinder | None:
    return next((f for f in sys.meta_path if isinstance(f, NotebookFinder)), None)
