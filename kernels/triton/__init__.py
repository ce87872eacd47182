"""Triton kernels, one operation a module, for a GPU or, without one, Triton's interpreter.

    from kernels.triton.softmax import softmax

    softmax(torch.randn(4, 1000))                      # on the GPU: torch.randn(..., device="cuda")

Importing this package decides once, for the process, which of the two it is. Without a CUDA device,
and unless TRITON_INTERPRET is set already, it sets TRITON_INTERPRET=1: kernels then run as Python
over NumPy arrays, block by block, thousands of times slower. Every line can be printed or stepped
through, and what programs load and store be watched (`kernels.triton.programs`); where the
interpreter errs it says so (`kernels.triton.interpreter`). `@triton.jit` reads that variable where
it stands, so kernels of your own must come after this import; Triton itself may have been imported
before (PyTorch does, to compile).

`INTERPRETED` says what was decided. Left out: names at this level. Each module holds its kernels
and one plain function of the same name as the module.
"""

from __future__ import annotations

import importlib.util
import os

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


INTERPRETED: bool = _decide()
if INTERPRETED:
    from kernels.triton.interpreter import mend

    mend()
