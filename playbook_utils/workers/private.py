"""What this wing uses of other projects' private names; all of it stands here.

A version that lacks one stops the import with the name that moved, not a launch in its middle.

    from playbook_utils.workers.private import code_reduce
"""

from __future__ import annotations

from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_ID as classes_by_id
from cloudpickle.cloudpickle import (
    _class_setstate,
    _make_skeleton_class,
    _make_skeleton_enum,
)
from cloudpickle.cloudpickle import _code_reduce as code_reduce

# Public by name, but PyTorch does not export them.
from torch.distributed import FileStore, set_debug_level_from_env  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _canonicalize_group_rank as group_rank
from torch.distributed.distributed_c10d import _world as world

__all__ = [
    "SET_CLASS", "SKELETONS", "FileStore", "classes_by_id", "code_reduce", "group_rank",
    "set_debug_level_from_env", "world",
]  # fmt: skip

SKELETONS = (_make_skeleton_class.__name__, _make_skeleton_enum.__name__)
"""What a pickle calls to make a class by value; `classes_by_id` holds those that travelled."""
SET_CLASS: str = _class_setstate.__name__
"""What a pickle calls to fill that class."""
