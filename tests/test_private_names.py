"""Private names of libraries on which a wing relies: where one is gone, this says who used it."""

from __future__ import annotations

import importlib

import pytest

NAMES = {
    # (module, name): who uses it
    ("torch._inductor.graph:GraphLowering", "save_output_code"): "kernels/generated.py",
    ("torch._inductor.utils", "run_and_get_code"): "kernels/generated.py",
    ("triton.runtime:driver", "_active"): "kernels/generated.py",
    ("triton.backends.compiler", "GPUTarget"): "kernels/generated.py",
    ("nbclient.client:NotebookClient", "_cleanup_kernel"): "commands/execution.py",
    ("torch.utils._python_dispatch", "TorchDispatchMode"): "exercises/flash_attention.py",
    ("torch.utils._pytree", "tree_leaves"): "exercises/flash_attention.py",
    ("torch:UntypedStorage", "_cdata"): "exercises/zero.py",
}


@pytest.mark.parametrize(("place", "name"), NAMES)
def test_a_private_name_is_still_there(place: str, name: str) -> None:
    module, _, owner = place.partition(":")
    found = importlib.import_module(module)
    found = getattr(found, owner) if owner else found
    assert hasattr(found, name), f"{place} has no {name} any more: see {NAMES[place, name]}"
