"""Compile the Triton kernels for a GPU that need not be here: PTX, registers, shared memory.

    for kernel in compile_kernels(90, modules=("softmax",)):
        print(kernel.name, kernel.registers, kernel.shared_bytes, kernel.ptx.count("ld.global"))

    python -m kernels.triton.ptx --capability 80 90 --all-configs           # prints a table

Triton's own compiler and assembler (`ptxas` comes in its wheel) run, in a process of their own,
because in this one Triton may be set to interpret. What is compiled is what a launch with large,
aligned, contiguous tensors of `dtype` would compile. A kernel that does not compile raises
`KernelCompileError` with the compiler's message.

Left out: running it, and AMD.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.triton import private
from kernels.triton.tuning import row_block

__all__ = ["DTYPES", "MODULES", "CompiledKernel", "KernelCompileError", "compile_kernels"]

DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}

# What a launch passes besides tensors and sizes, by module and kernel.
MODULES: dict[str, dict[str, dict[str, Any]]] = {
    "vector_add": {"vector_add_kernel": {"BLOCK": 1024}},
    "elu": {"elu_kernel": {"BLOCK": 1024}, "elu_backward_kernel": {"BLOCK": 1024}},
    "softmax": {
        "softmax_kernel": row_block(4096),
        "online_softmax_kernel": row_block(16384),
        "softmax_backward_kernel": row_block(4096),
    },
    "layer_norm": {
        "layer_norm_kernel": {"HAS_BIAS": True, **row_block(4096)},
        "layer_norm_backward_kernel": {"DWEIGHT": True, "DBIAS": True, **row_block(4096)},
    },
    "rms_norm": {
        "rms_norm_kernel": row_block(4096),
        "rms_norm_backward_kernel": {"DWEIGHT": True, **row_block(4096)},
    },
    "cross_entropy": {
        "cross_entropy_kernel": row_block(8192),
        "cross_entropy_backward_kernel": row_block(8192),
    },
    "matmul": {"matmul_kernel": {"a_stride_k": 1, "b_stride_n": 1}},
    "flash_attention": {
        "flash_attention_kernel": {"GROUP": 4, "CAUSAL": True, "HEAD_DIM": 128, "BLOCK_D": 128}
    },
    "flash_attention_backward": {
        "delta_kernel": {"HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_M": 64},
        "dkdv_kernel": {"GROUP": 4, "CAUSAL": True, "HEAD_DIM": 128, "BLOCK_D": 128},
        "dq_kernel": {"GROUP": 4, "CAUSAL": True, "HEAD_DIM": 128, "BLOCK_D": 128},
    },
    "fp8_matmul": {
        "quantize_kernel": {"PER_ROW": True, "ROWS": 32, "BLOCK_K": 128},
        "fp8_matmul_kernel": {"SCALE_BLOCK": 128},
    },
}

# Types of arguments that are neither tensors of `dtype` (*_ptr) nor 32-bit sizes.
_TYPES = {"eps": "fp32", "alpha": "fp32", "scale": "fp32", "target_ptr": "*i64"}
_FP32 = ("mean", "rstd", "lse", "dlse", "loss", "dloss", "delta", "scale", "a_scale", "b_scale")
_TYPES |= {f"{name}_ptr": "*fp32" for name in _FP32}
_FP8 = {
    ("quantize_kernel", "y_ptr"),
    ("fp8_matmul_kernel", "a_ptr"),
    ("fp8_matmul_kernel", "b_ptr"),
}
_PARTIAL_SUMS = {"dweight_ptr", "dbias_ptr"}  # fp32: added up by PyTorch afterwards


class KernelCompileError(RuntimeError):
    """A kernel that Triton's compiler, or ptxas, refused."""


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel, compiled for one configuration and one compute capability."""

    module: str
    name: str
    capability: int
    config: dict[str, int]
    ptx: str
    registers: int
    """Of each thread; at most 255."""
    spilled_bytes: int
    """Of each thread: values that found no register, and live in memory."""
    shared_bytes: int
    """Of each program."""


def compile_kernels(
    capability: int,
    modules: Sequence[str] = tuple(MODULES),
    dtype: str = "bfloat16",
    all_configs: bool = False,
) -> tuple[CompiledKernel, ...]:
    """Compile the kernels of `modules` for sm_`capability`, in a process of their own.

    Args:
        capability: 80 for A100, 90 for H100, 100 for B200.
        modules: names from `MODULES`.
        dtype: of the tensors: float32, float16 or bfloat16.
        all_configs: every configuration that autotuning would try, not just the first.

    Raises:
        ValueError: a name or dtype that is not known.
        KernelCompileError: a kernel that does not compile, with the compiler's last lines.
    """
    unknown = [name for name in modules if name not in MODULES]
    if unknown:
        raise ValueError(f"modules names {unknown}: expected some of {list(MODULES)}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}: expected one of {list(DTYPES)}")
    command = [sys.executable, "-m", "kernels.triton.ptx", *modules, "--json", "--dtype", dtype]
    command += ["--capability", str(capability), *["--all-configs"] * all_configs]
    root = Path(__file__).resolve().parents[2]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        tail = "\n".join(done.stderr.strip().splitlines()[-15:])
        raise KernelCompileError(
            f"compiling {', '.join(modules)} for sm_{capability} failed:\n{tail}"
        )
    return tuple(CompiledKernel(**kernel) for kernel in json.loads(done.stdout))


def _compile_module(
    module: str, capability: int, dtype: str, all_configs: bool
) -> Iterator[CompiledKernel]:
    loaded = importlib.import_module(f"kernels.triton.{module}")
    for name, launch in MODULES[module].items():
        kernel = getattr(loaded, name)
        candidates = getattr(kernel, "candidates", {}).get(getattr(torch, dtype), [])
        configs = [config.all_kwargs() for config in candidates] or [{}]
        function = kernel.fn if candidates else kernel
        for config in configs if all_configs else configs[:1]:
            try:
                yield _compile(module, function, capability, dtype, launch | config)
            except Exception as error:
                raise KernelCompileError(f"{module}.{name} with {config}: {error}") from error


def _compile(
    module: str, function: Any, capability: int, dtype: str, launch: dict[str, Any]
) -> CompiledKernel:
    import triton

    name = function.__name__
    constants = {key: value for key, value in launch.items() if key in function.arg_names}
    options = {key: value for key, value in launch.items() if key in ("num_warps", "num_stages")}
    signature = {}
    for argument in function.arg_names:
        if argument in constants:
            signature[argument] = "constexpr"
        elif (name, argument) in _FP8:
            signature[argument] = "*fp8e4nv"
        elif argument in _PARTIAL_SUMS:
            signature[argument] = "*fp32"
        elif argument in _TYPES:
            signature[argument] = _TYPES[argument]
        else:
            signature[argument] = f"*{DTYPES[dtype]}" if argument.endswith("_ptr") else "i32"
    # What the launcher finds out about aligned tensors and sizes that are multiples of 16.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, kind in enumerate(signature.values())
        if kind.startswith("*") or kind == "i32"
    }
    source = private.ASTSource(
        fn=function, signature=signature, constexprs=constants, attrs=aligned
    )
    compiled = triton.compile(
        source, target=private.GPUTarget("cuda", capability, 32), options=options
    )
    registers, spilled_bytes = _resources(compiled.asm["cubin"])
    config = {key: value for key, value in launch.items() if key.startswith(("BLOCK", "num_"))}
    return CompiledKernel(
        module, name, capability, config, compiled.asm["ptx"],
        registers, spilled_bytes, compiled.metadata.shared,
    )  # fmt: skip


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread, by the cuobjdump in Triton's wheel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [private.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*? LOCAL:(\d+)", text)
    if found is None:
        raise KernelCompileError(f"cuobjdump printed no registers: {text!r}")
    return int(found[1]), int(found[2]) + int(found[3])


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kernels.triton.ptx")
    parser.add_argument("modules", nargs="*", metavar="module", help=", ".join(MODULES))
    parser.add_argument("--capability", type=int, nargs="+", default=[90])
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--all-configs", action="store_true")
    parser.add_argument("--json", action="store_true", help="for compile_kernels")
    options = parser.parse_args()
    if not options.json:
        print(f"{'kernel':32} {'sm':>3} {'registers':>9} {'spilled B':>9} {'shared B':>8}  config")
    kernels: list[CompiledKernel] = []
    for capability in options.capability:
        for module in options.modules or MODULES:
            if options.json:
                kernels += _compile_module(module, capability, options.dtype, options.all_configs)
                continue
            for row in compile_kernels(capability, (module,), options.dtype, options.all_configs):
                print(
                    f"{row.name:32} {row.capability:3} {row.registers:9} {row.spilled_bytes:9} "
                    f"{row.shared_bytes:8}  {row.config}",
                    flush=True,
                )
    if options.json:
        print(json.dumps([asdict(kernel) for kernel in kernels]))


if __name__ == "__main__":
    _main()
