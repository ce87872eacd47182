"""What torch.compile writes: the Triton kernels, without a GPU, and the C++ of this machine's CPU.

    code = triton_code(elu, x)          # no GPU, no C++ compiler: nothing is compiled or run
    code.kernels[0].name, code.kernels[0].body, code.kernels[0].num_loads
    code.library_calls                  # matrix products stay calls of a library
    compiled, code = cpp_code(elu, x)   # compiled by g++ and run; call compiled(x) again

TorchInductor writes Triton for a GPU and C++ for a CPU. Told that the CPU's language is Triton
(`cpu_backend`), it writes for CPU tensors what it writes for CUDA ones, but for the decorator and
what depends on the chip: whole blocks of configurations, and libdevice's functions.

Left out: backward, graph breaks (the first graph is read), launch configurations.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

__all__ = ["GeneratedCode", "GeneratedKernel", "cpp_code", "triton_code"]

# PyTorch's cache does not know for which instruction set its C++ was written, and gives what does
# not compile under ATEN_CPU_CAPABILITY=default.
_FRESH: dict[str, Any] = {"fx_graph_cache": False}


@dataclass(frozen=True)
class GeneratedKernel:
    """One function that would be launched (Triton) or called (C++)."""

    name: str
    body: str
    """Its source from `def` or `extern "C"` on."""

    @property
    def num_loads(self) -> int:
        """Lines that load, in Triton: `tl.load`. What C++ loads depends on the instruction set."""
        return self.body.count("tl.load(")

    @property
    def num_stores(self) -> int:
        """Lines that store, in Triton."""
        return self.body.count("tl.store(")


@dataclass(frozen=True)
class GeneratedCode:
    """All that was written for one function."""

    text: str
    kernels: tuple[GeneratedKernel, ...]
    library_calls: tuple[str, ...]
    """Calls of PyTorch's own kernels and libraries, in order: ("mm",)."""


class _Written(Exception):
    """Stops the compiler when the code is there."""


class _NoGpu:
    """Says that an H100 is there, to a code generator that asks no more than that."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def triton_code(fn: Callable[..., Any], *args: Any, dynamic: bool = False) -> GeneratedCode:
    """The Triton code for `fn(*args)` (CPU tensors); `dynamic`: for any size.

    Raises:
        ModuleNotFoundError: Triton is not installed.
        RuntimeError: nothing was written: no tensors among `args`.
    """
    from torch._inductor.graph import GraphLowering
    from triton.runtime import driver

    texts: list[str] = []

    def take(text: str) -> None:
        texts.append(text)
        raise _Written

    compiled = torch.compile(fn, dynamic=dynamic, options=_FRESH | {"cpu_backend": "triton"})
    stop = mock.patch.object(GraphLowering, "save_output_code", staticmethod(take))
    here = mock.patch.object(driver, "_active", _NoGpu())
    torch.compiler.reset()
    quiet = warnings.catch_warnings()  # "generated kernels will not be executable": they need not
    with torch.no_grad(), stop, here, quiet:
        warnings.simplefilter("ignore", UserWarning)
        try:
            compiled(*args)
        except Exception:
            if not texts:
                raise
    torch.compiler.reset()
    text = _first(texts)
    found = re.findall(r"^@triton\.jit\n(def (\w+)\(.*?)^'''", text, flags=re.MULTILINE | re.DOTALL)
    return _code(text, [(name, body) for body, name in found])


def cpp_code(fn: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], GeneratedCode]:
    """(`fn`, compiled for the sizes of `args` and run once; the C++ that was written for it).

    Raises:
        RuntimeError: nothing was written.
        torch._inductor.exc.InductorError: no C++ compiler here.
    """
    from torch._inductor.utils import run_and_get_code

    compiled = torch.compile(fn, dynamic=False, options=_FRESH)
    with torch.no_grad():
        text = _first(run_and_get_code(compiled, *args)[1])
    found = re.findall(
        r"^(\w+) = async_compile\.cpp_pybinding\(.*?(extern \"C\".*?)^'''", text,
        flags=re.MULTILINE | re.DOTALL,
    )  # fmt: skip
    return compiled, _code(text, found)


def _first(texts: list[str]) -> str:
    if not texts:
        raise RuntimeError("the compiler wrote no code: does the function use its tensors?")
    return texts[0]


def _code(text: str, kernels: list[tuple[str, str]]) -> GeneratedCode:
    calls = re.findall(r"^\s+(?:\w+ = )?(?:extern_kernels|aten|torch\.ops\.\w+)\.(\w+)", text, re.M)
    return GeneratedCode(text, tuple(GeneratedKernel(*pair) for pair in kernels), tuple(calls))
