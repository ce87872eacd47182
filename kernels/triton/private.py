"""The private names of Triton that this package uses, all of them, found when asked for.

    from kernels.triton import private

    private.InterpretedFunction

A release of Triton may move any of them. The error then says which, and
`tests/kernels/test_triton_private.py` asks for each.
"""

from __future__ import annotations

import pkgutil
from typing import Any

__all__ = ["NAMES"]

NAMES = {
    "ASTSource": "triton.compiler:ASTSource",
    "GPUTarget": "triton.backends.compiler:GPUTarget",
    "InterpretedFunction": "triton.runtime.interpreter:InterpretedFunction",
    "InterpreterBuilder": "triton.runtime.interpreter:InterpreterBuilder",
    "InterpreterError": "triton.runtime.errors:InterpreterError",
    "JITFunction": "triton.runtime.jit:JITFunction",
    "ReduceScan": "triton.runtime.interpreter:ReduceScanOpInterface",
    "TensorHandle": "triton.runtime.interpreter:TensorHandle",
    "cuobjdump": "triton:knobs.nvidia.cuobjdump",
    "get_np_dtype": "triton.runtime.interpreter:_get_np_dtype",
    "interpreter_builder": "triton.runtime.interpreter:interpreter_builder",
}
"""Where each name is found: "module:attribute"."""


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return pkgutil.resolve_name(NAMES[name])
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"{NAMES[name]} is not in this version of Triton: install the one that "
            f"pyproject.toml asks for, or mend {__name__}"
        ) from error
