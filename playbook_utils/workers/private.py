"""What this wing uses of other projects' private names; all of it stands here.

A version that lacks one stops the import with the name that moved, not a launch in its middle.

    from playbook_utils.workers.private import code_reduce
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, MutableMapping
from typing import Any

__all__ = [
    "SET_CLASS", "SKELETONS", "FileStore", "classes_by_id", "code_reduce", "find", "group_rank",
    "set_debug_level_from_env",
]  # fmt: skip


def find(module: str, name: str) -> Any:
    """A private name of another project.

    Raises:
        ImportError: it is not there; names it, and the version that lacks it.
    """
    found = importlib.import_module(module)
    try:
        return getattr(found, name)
    except AttributeError:
        project = module.partition(".")[0]
        version = getattr(importlib.import_module(project), "__version__", "of unknown version")
        raise ImportError(
            f"{project} {version} has no {module}.{name}, which playbook_utils.workers uses: "
            "install the versions that pyproject.toml names"
        ) from None


code_reduce: Callable[..., tuple[Any, ...]] = find("cloudpickle.cloudpickle", "_code_reduce")
"""(function, arguments) that make a code object anew."""
classes_by_id: MutableMapping[str, type] = find(
    "cloudpickle.cloudpickle", "_DYNAMIC_CLASS_TRACKER_BY_ID"
)
"""The classes that travelled by value, here or to here."""
SKELETONS = tuple(
    find("cloudpickle.cloudpickle", name).__name__
    for name in ("_make_skeleton_class", "_make_skeleton_enum")
)
"""What a pickle calls to make a class by value."""
SET_CLASS: str = find("cloudpickle.cloudpickle", "_class_setstate").__name__
"""What a pickle calls to fill that class."""

group_rank: Callable[..., Any] = find(
    "torch.distributed.distributed_c10d", "_canonicalize_group_rank"
)
"""Every call that names a peer comes by here, with the peer's rank of the world or of its group."""

# Public by name, but PyTorch does not export them.
FileStore: Callable[[str, int], Any] = find("torch.distributed", "FileStore")
set_debug_level_from_env: Callable[[], None] = find("torch.distributed", "set_debug_level_from_env")
