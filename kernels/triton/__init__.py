"""Triton kernels, one operation a module, for a GPU or, without one, Triton's interpreter.

    from kernels.triton.softmax import softmax

    softmax(torch.randn(4, 1000))                      # on the GPU: torch.randn(..., device="cuda")

Importing this package decides once, for the process, which of the two it is. Without a CUDA device,
and unless TRITON_INTERPRET is set already, it sets TRITON_INTERPRET=1: kernels then run as Python
over NumPy arrays, block by block, thousands of times slower, and every line can be printed or
stepped through. `@triton.jit` reads that variable where it stands, so kernels of your own must come
after this import; Triton itself may have been imported before (PyTorch does, to compile).

`INTERPRETED` says what was decided. Left out: names at this level. Each module holds its kernels
and one plain function of the same name as the module.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["INTERPRETED"]


def _decide() -> bool:
    if importlib.util.find_spec("triton") is None:
        raise ImportError(
            "kernels.triton needs the package triton, which is not installed here (it is made for "
            "Linux only). The lessons' PyTorch versions of these operations run without it."
        )
    if "TRITON_INTERPRET" not in os.environ and not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    # Triton 3.9 warns, once, that this default will change; the kernels are tested with fusion.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    return os.environ.get("TRITON_INTERPRET") == "1"


def _interpret_library() -> None:
    """Make Triton's own functions interpreted ones, where it was imported before the decision.

    tl.max, tl.sum, tl.cdiv and their like are `@triton.jit` functions too. Made for the compiler,
    they fail inside an interpreted kernel: "Cannot call @triton.jit'd outside of the scope of a
    kernel".
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def method(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: function(*args, **kwargs)

    made: dict[int, Any] = {}
    names = [name for name in sys.modules if name.split(".")[:2] == ["triton", "language"]]
    for owner in (*(sys.modules[name] for name in names), tl.tensor):
        for name, value in list(vars(owner).items()):
            if isinstance(value, JITFunction):
                function = made.setdefault(id(value), InterpretedFunction(value.fn))
                setattr(owner, name, method(function) if owner is tl.tensor else function)


INTERPRETED: bool = _decide()
if INTERPRETED:
    _interpret_library()
