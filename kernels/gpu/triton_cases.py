"""The modules of `kernels/triton` as cases, forward and backward, against eager, compile and SDPA.

    triton_cases("cuda", LARGE)                     # to be timed
    triton_cases("cuda", TIMED, torch.float32)      # to be checked: the same paths as LARGE
    triton_cases("cpu", ODD)                        # to be checked, here in the interpreter

Each gives one iterator a group of operations, so that a group that cannot be built hides no other.
Left out: a range of sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from kernels.gpu.case import Case, NotRunError, Tensors

__all__ = ["LARGE", "ODD", "TIMED", "TritonSizes", "triton_cases"]

Plain = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class TritonSizes:
    """How large the cases are."""

    elements: int
    rows: int
    columns: int
    vocab_size: int
    matmul: tuple[int, int, int]
    batch: int
    heads: int
    key_heads: int
    seq_len: int
    head_dim: int


LARGE = TritonSizes(1 << 26, 16384, 4096, 128_256, (4096, 4096, 4096), 2, 32, 8, 4096, 128)
TIMED = TritonSizes(4099, 300, 4096, 128_256, (1030, 1040, 1096), 1, 8, 2, 515, 128)
"""Blocks, widths of rows and settings as in LARGE, where a check in fp64 is cheap."""
ODD = TritonSizes(1001, 7, 333, 1003, (70, 65, 130), 1, 4, 2, 70, 24)


def triton_cases(
    device: str, sizes: TritonSizes, dtype: torch.dtype = torch.bfloat16
) -> tuple[Iterator[Case], ...]:
    """Each operation, and each gradient."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(dtype)

    return (
        _elementwise(randn, sizes.elements, dtype),
        _rows(randn, sizes, dtype),
        _matmuls(randn, sizes.matmul),
        _fp8(randn, sizes.matmul, dtype),
        _attention(randn, sizes),
    )


def _case(
    name: str,
    fn: Plain,
    plain: Plain,
    inputs: Tensors,
    rivals: Mapping[str, Plain],
    backward: bool = False,
    **work: int,
) -> Case:
    """`fn(*inputs)`, or with `backward` that and the gradients, compared with `plain` in fp64."""
    dtype = inputs[0].dtype
    upstreams: dict[torch.dtype, torch.Tensor] = {}

    def upstream(out: torch.Tensor) -> torch.Tensor:
        """Made once: it is to be no part of the time."""
        if out.dtype not in upstreams:
            # Changes from column to column: of a constant row, a softmax's gradient is zero.
            values = torch.arange(out.numel(), device=out.device) % 11 - 5
            upstreams[out.dtype] = values.view_as(out).to(out.dtype)
        return upstreams[out.dtype]

    def call(function: Callable[..., Any], tensors: Tensors, wanted: bool) -> Tensors:
        if not wanted:
            return (function(*tensors).detach(),)
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = function(*leaves)
        return (out.detach(), *torch.autograd.grad(out, leaves, upstream(out)))

    return Case(
        name + (" + backward" if backward else ""),
        dtype,
        lambda: call(fn, inputs, backward),
        lambda: call(plain, tuple(x.double() for x in inputs), backward),
        {rival: partial(call, function, inputs, backward) for rival, function in rivals.items()},
        flops=work.get("flops", 0),
        moved_bytes=work.get("moved_bytes", 0),
    )


def _compiled(function: Plain) -> Plain:
    """`function` by torch.compile, which is not loaded before the first call."""

    @cache
    def compiled() -> Plain:
        return torch.compile(function, dynamic=False)

    return lambda *inputs: compiled()(*inputs)


def _elementwise(randn: Any, n: int, dtype: torch.dtype) -> Iterator[Case]:
    from kernels.triton.elu import elu
    from kernels.triton.vector_add import vector_add

    def plain_elu(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, torch.expm1(x))

    x, y = randn(n), randn(n)
    rivals: dict[str, Plain] = {"eager": torch.add, "compile": _compiled(torch.add)}
    moved_bytes = 3 * n * dtype.itemsize
    yield _case("triton vector_add", vector_add, torch.add, (x, y), rivals, moved_bytes=moved_bytes)
    rivals = {"eager": plain_elu, "compile": _compiled(plain_elu)}
    moved_bytes = 2 * n * dtype.itemsize
    yield _case("triton elu", elu, plain_elu, (x,), rivals, moved_bytes=moved_bytes)


def _rows(randn: Any, sizes: TritonSizes, dtype: torch.dtype) -> Iterator[Case]:
    from kernels.triton.cross_entropy import cross_entropy
    from kernels.triton.layer_norm import layer_norm
    from kernels.triton.rms_norm import rms_norm
    from kernels.triton.softmax import softmax

    columns = sizes.columns
    x, weight, bias = randn(sizes.rows, columns), randn(columns), randn(columns)
    logits = randn(sizes.rows // 4 + 1, sizes.vocab_size)
    target = torch.arange(logits.shape[0], device=logits.device) % sizes.vocab_size
    target[0] = -100

    def plain_softmax(x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1)

    def plain_layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (columns,), w, b)

    def plain_rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (columns,), w, 1e-6)

    def plain_cross_entropy(logits: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, target)

    def ours(logits: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits, target)

    operations: list[tuple[str, Any, Any, Tensors]] = [
        ("softmax", softmax, plain_softmax, (x,)),
        ("layer_norm", layer_norm, plain_layer_norm, (x, weight, bias)),
        ("rms_norm", rms_norm, plain_rms_norm, (x, weight)),
        ("cross_entropy", ours, plain_cross_entropy, (logits,)),
    ]
    for name, fn, plain, inputs in operations:
        rivals = {"eager": plain, "compile": _compiled(plain)}
        size_bytes = inputs[0].numel() * dtype.itemsize
        # Read and written once; backward reads two tensors of that size and writes one.
        once = 1 if name == "cross_entropy" else 2
        yield _case(f"triton {name}", fn, plain, inputs, rivals, moved_bytes=once * size_bytes)
        yield _case(
            f"triton {name}", fn, plain, inputs, rivals, True,
            moved_bytes=(2 * once + 1) * size_bytes,
        )  # fmt: skip


def _matmuls(randn: Any, size: tuple[int, int, int]) -> Iterator[Case]:
    from kernels.triton.matmul import matmul

    M, N, K = size
    a, b = randn(M, K), randn(K, N)
    flops, rivals = 2 * M * N * K, {"cuBLAS": torch.matmul}
    yield _case("triton matmul", matmul, torch.matmul, (a, b), rivals, flops=flops)
    yield _case("triton matmul", matmul, torch.matmul, (a, b), rivals, True, flops=3 * flops)


def _fp8(randn: Any, size: tuple[int, int, int], dtype: torch.dtype) -> Iterator[Case]:
    from kernels.triton.fp8_matmul import (
        dequantize,
        fp8_matmul,
        quantize_activations,
        quantize_weights,
    )

    M, N, K = size
    a, b = randn(M, K), randn(K, N)

    @cache  # within the first run: an error there is this case's own
    def quantised() -> tuple[Tensors, Tensors]:
        if a.is_cuda and torch.cuda.get_device_capability(a.device) < (8, 9):
            raise NotRunError("FP8 needs compute capability 8.9 or newer")
        return quantize_activations(a), quantize_weights(b.t())

    def run() -> Tensors:
        (x, x_scales), (w, w_scales) = quantised()
        return (fp8_matmul(x, x_scales, w, w_scales, dtype),)

    def reference() -> Tensors:
        x, w = quantised()
        return (dequantize(*x) @ dequantize(*w).T,)

    rivals = {f"cuBLAS {str(dtype).removeprefix('torch.')}": lambda: a @ b}
    yield Case("triton fp8_matmul", dtype, run, reference, rivals, flops=2 * M * N * K)


def _attention(randn: Any, sizes: TritonSizes) -> Iterator[Case]:
    from kernels.triton.flash_attention import flash_attention

    q = randn(sizes.batch, sizes.heads, sizes.seq_len, sizes.head_dim)
    k, v = (randn(sizes.batch, sizes.key_heads, sizes.seq_len, sizes.head_dim) for _ in range(2))
    for causal in (False, True):
        fn = partial(flash_attention, causal=causal)
        plain = partial(F.scaled_dot_product_attention, is_causal=causal, enable_gqa=True)

        # Two products forward, five backward (Dao 2023, section 4.1: 2.5 times); half if causal.
        flops = 4 * q.numel() * sizes.seq_len // (2 if causal else 1)
        name = "triton flash_attention" + (", causal" if causal else "")
        for backward, work in ((False, flops), (True, flops * 7 // 2)):
            yield _case(name, fn, plain, (q, k, v), {"SDPA": plain}, backward, flops=work)
