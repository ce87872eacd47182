"""The private names of PyTorch that this wing uses, all of them, found when asked for.

    from playbook_utils.measure.private import tree_leaves, storage_id

A release may move any of them. The error then says which name, and `tests/measure/test_private.py`
asks for each. Left out: what a memory tracker calls its own parts (`measure.tracker`, same test).
"""

from __future__ import annotations

import pkgutil
from typing import Any

from torch import Tensor

__all__ = ["NAMES", "local_part", "storage_id"]

NAMES = {
    # Attributes that are used where an object is at hand.
    "schema": "torch:ops.aten.add.out._schema.arguments",
    "storage_cdata": "torch:UntypedStorage._cdata",
    # What is imported from here.
    "FSDPMemTracker": "torch.distributed._tools.fsdp2_mem_tracker:FSDPMemTracker",
    "MemTracker": "torch.distributed._tools.mem_tracker:MemTracker",
    "TorchDispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
    "cpu_flash": "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "cpu_flash_backward": "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "dump_snapshot": "torch.cuda.memory:_dump_snapshot",
    "record_memory_history": "torch.cuda.memory:_record_memory_history",
    "resolve_process_group": "torch._C._distributed_c10d:_resolve_process_group",
    "tree_leaves": "torch.utils._pytree:tree_leaves",
}
"""Where each name is found: "module:attribute"."""


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return pkgutil.resolve_name(NAMES[name])
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"{NAMES[name]} is not in this version of torch: install the one that "
            f"pyproject.toml asks for, or mend {__name__}"
        ) from error


def storage_id(tensor: Tensor) -> int:
    """Of the memory that a tensor lies in: equal for views, not used again while one is alive."""
    return int(tensor.untyped_storage()._cdata)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part
