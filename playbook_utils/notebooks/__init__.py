"""Import definitions from notebooks.

A code cell whose first line is `#| export` belongs to its notebook's module. After
`import playbook_utils`, which calls `install()`, this reads the exported cells of
`NN_data_parallelism.ipynb` and nothing else of it:

    from notebooks.data_parallelism import BucketedDDP

An exported cell may only define and import. Its number in errors and tracebacks is the [n] that
Jupyter shows beside it after a run from top to bottom. Sources stay visible to `inspect`, to
debuggers and in tracebacks. Imported definitions are pickled by reference; in the notebook that
is open, the same cells define names of `__main__`, as any cell does.

Left out: reloading. A notebook that was edited and saved is read anew after a kernel restart.
"""

from playbook_utils.notebooks.finder import (
    expect_notebooks,
    find_folder,
    install,
    loaded_notebooks,
    notebook_folder,
)

__all__ = ["expect_notebooks", "find_folder", "install", "loaded_notebooks", "notebook_folder"]
