"""What a Triton kernel does under Triton's interpreter: programs, loads, stores, lanes, bytes.

    with watch_programs(x=x, y=y) as log:
        kernel[grid](x, y, x.numel(), BLOCK=128)
    log.launches, log.programs, log.loaded_bytes, log.stored_bytes
    log.lanes, log.masked_lanes             # of all loads and stores; masked: switched off
    log["x"].load_counts                    # how often each element was read

An access outside of the tensors named, by a lane that is not masked, raises IndexError before it
touches memory: on a GPU it would read, or overwrite, whatever lies there. For a view, what lies
between its rows counts as outside. A masked lane that is loaded without `other` holds NaN (an
integer: the largest), where the interpreter alone would give 0 and a GPU gives anything.

Two programs that touch one element, one of them with a write, raise RaceError, unless both are
atomic or something orders them (`program_races`): `y = load; store(y + part)` by several
programs is right here, where they run one after the other, and nonsense on a GPU. Arithmetic on
bfloat16, which the interpreter cannot do, raises TypeError (`kernels.triton.interpreter`).

Left out: kernels that run on a GPU, caches (a second read counts again), and an access that leaves
one tensor and lands in another that is named too: it is counted there.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from kernels.errors import message_alone
from kernels.triton import private
from kernels.triton.interpreter import kernel_line
from kernels.triton.program_races import ProgramOrder

__all__ = ["ProgramLog", "TensorTraffic", "watch_programs"]


@dataclass
class TensorTraffic:
    """What kernels did with one tensor."""

    name: str
    itemsize: int
    addresses: Any
    """Of its elements, sorted; a NumPy array, as the two below."""
    order: Any
    """Position of each of `addresses` in the tensor, read row by row."""
    load_counts: Any
    """Times that each element was read, in the tensor's order."""
    store_counts: Any
    """Times that each element was written, in the tensor's order."""

    @property
    def loaded_bytes(self) -> int:
        """Bytes read, an element that is read twice counted twice."""
        return int(self.load_counts.sum()) * self.itemsize

    @property
    def stored_bytes(self) -> int:
        """Bytes written."""
        return int(self.store_counts.sum()) * self.itemsize


@dataclass
class ProgramLog:
    """Counts of all launches inside the `with`."""

    tensors: dict[str, TensorTraffic]
    launches: int = 0
    programs: int = 0
    lanes: int = 0
    """Elements of the blocks that were loaded and stored, masked ones included."""
    masked_lanes: int = 0
    """Those of `lanes` that moved nothing."""
    _program: tuple[int, ...] = field(default=(), repr=False)
    _order: ProgramOrder = field(default_factory=lambda: ProgramOrder({}, str), repr=False)

    def __getitem__(self, name: str) -> TensorTraffic:
        return self.tensors[name]

    @property
    def loaded_bytes(self) -> int:
        """Bytes read from all tensors."""
        return sum(tensor.loaded_bytes for tensor in self.tensors.values())

    @property
    def stored_bytes(self) -> int:
        """Bytes written to all tensors."""
        return sum(tensor.stored_bytes for tensor in self.tensors.values())

    @property
    def bytes(self) -> int:
        """Read and written."""
        return self.loaded_bytes + self.stored_bytes

    def _access(
        self, pointers: Any, mask: Any, kind: str, values: Any = None, sem: str = ""
    ) -> None:
        pointers, mask = np.broadcast_arrays(pointers, mask)
        self.lanes += mask.size
        self.masked_lanes += int(mask.size - mask.sum())
        left = pointers[mask].astype(np.int64)
        # What is stored, in the order of `left`.
        values = None if values is None else np.broadcast_to(values, pointers.shape)[mask]
        for tensor in self.tensors.values():
            place = np.searchsorted(tensor.addresses, left)
            known = tensor.addresses[np.minimum(place, tensor.addresses.size - 1)] == left
            elements = tensor.order[place[known]]
            for counts, word in ((tensor.load_counts, "load"), (tensor.store_counts, "store")):
                if word in kind:
                    np.add.at(counts, elements, 1)
            if elements.size:
                same = None if values is None else _equal(left[known], values[known])
                self._order.touch(tensor.name, elements, kind, same)
            left, values = left[~known], None if values is None else values[~known]
        if left.size:
            raise message_alone(IndexError(self._outside(int(left[0]), kind)))
        if sem and mask.sum() == 1:
            self._order.synchronise(int(pointers[mask][0]), sem)

    def _outside(self, address: int, kind: str) -> str:
        """Which element of the nearest tensor this address would be."""

        def distance(tensor: TensorTraffic) -> int:
            return int(np.abs(tensor.addresses - address).min())

        nearest = min(self.tensors.values(), key=distance)
        offset = (address - int(nearest.addresses[0])) // nearest.itemsize
        return (
            f"{kind} outside of {', '.join(self.tensors)}: program {self._program} reaches "
            f"{nearest.name}[{offset}] (counted from its first element; it has "
            f"{nearest.addresses.size}); mask the lanes that have no element, check the strides"
        )


@contextmanager
def watch_programs(**tensors: Tensor) -> Iterator[ProgramLog]:
    """Count what Triton kernels do with these CPU tensors, under their names.

    Raises:
        ValueError: no tensors, an empty one, one that is not on the CPU.
        RuntimeError: Triton compiles here (TRITON_INTERPRET is not 1).
        IndexError, RaceError, TypeError: from within a kernel, which Triton wraps in its own
            InterpreterError: see `__cause__`.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "Triton's kernels are compiled here, and only interpreted ones can be watched: restart "
            'the kernel and begin with os.environ["TRITON_INTERPRET"] = "1"'
        )
    if not tensors:
        raise ValueError("no tensors named: expected all that the kernels use, as x=x, y=y")
    log = ProgramLog({name: _traffic(name, tensor) for name, tensor in tensors.items()})
    sizes = {name: tensor.order.size for name, tensor in log.tensors.items()}
    log._order = ProgramOrder(sizes, kernel_line)
    builder = private.interpreter_builder
    with mock.patch.multiple(builder, **_watched(builder, log)):
        yield log


def _watched(builder: Any, log: ProgramLog) -> dict[str, Any]:
    """What stands for the builder's methods of these names while `log` is filled."""
    load, store = builder.create_masked_load, builder.create_masked_store
    atomic, swap = builder.create_atomic_rmw, builder.create_atomic_cas
    place, size = builder.set_grid_idx, builder.set_grid_dim

    def watched_load(pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
        log._access(pointers.data, mask.data, "load")
        if other is None:  # the interpreter would give zeros
            other = _undefined(pointers)
        return load(pointers, mask, other, *rest, **named)

    def watched_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        log._access(pointers.data, mask.data, "store", value.data)
        return store(pointers, value, mask, *rest)

    def watched_atomic(op: Any, pointers: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        log._access(pointers.data, mask.data, "atomic load and store", sem=sem.name)
        return atomic(op, pointers, value, mask, sem, scope)

    def watched_swap(pointers: Any, compare: Any, value: Any, sem: Any, scope: Any) -> Any:
        log._access(pointers.data, True, "atomic load and store", sem=sem.name)
        return swap(pointers, compare, value, sem, scope)

    def atomic_load(pointers: Any, mask: Any, sem: Any, scope: Any) -> Any:
        log._access(pointers.data, mask.data, "atomic load", sem=sem.name)
        return load(pointers, mask, None, None, True)

    def atomic_store(pointers: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        log._access(pointers.data, mask.data, "atomic store", sem=sem.name)
        return store(pointers, value, mask, None)

    def watched_place(*position: int) -> None:
        log._program = position
        log._order.program(*position)
        place(*position)

    def watched_size(*grid: int) -> None:
        log.launches += 1
        log.programs += int(np.prod(grid))
        log._order.launch(*grid)
        size(*grid)

    return {
        "create_masked_load": watched_load,
        "create_masked_store": watched_store,
        "create_atomic_rmw": watched_atomic,
        "create_atomic_cas": watched_swap,
        "create_atomic_load": atomic_load,
        "create_atomic_store": atomic_store,
        "set_grid_idx": watched_place,
        "set_grid_dim": watched_size,
    }


def _equal(addresses: Any, values: Any) -> Callable[[int], bool]:
    """Whether value i is what lies at address i."""
    return lambda i: (
        ctypes.string_at(int(addresses[i]), values.itemsize) == values[i : i + 1].tobytes()
    )


def _undefined(pointers: Any) -> Any:
    """What masked lanes hold without `other`: on a GPU anything, here NaN or the largest number."""
    element = pointers.get_element_ty()
    dtype = np.dtype(private.get_np_dtype(element))
    value = {"f": float("nan"), "b": True}.get(dtype.kind)
    value = np.iinfo(dtype).max if value is None else value
    return private.TensorHandle(np.full(pointers.data.shape, value, dtype=dtype), element)


def _traffic(name: str, tensor: Tensor) -> TensorTraffic:
    if not isinstance(tensor, Tensor) or tensor.device.type != "cpu" or not tensor.numel():
        found = tensor.shape if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"{name} is {found}: expected a CPU tensor with elements")
    offsets = torch.zeros(tensor.shape, dtype=torch.int64)
    for dim, (length, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        shape = [1] * tensor.dim()
        shape[dim] = length
        offsets += (torch.arange(length) * stride).view(shape)
    flat = offsets.flatten().numpy()
    order = np.argsort(flat, kind="stable")
    addresses = tensor.data_ptr() + flat[order] * tensor.element_size()
    counts = [np.zeros(flat.size, dtype=np.int64) for _ in range(2)]
    return TensorTraffic(name, tensor.element_size(), addresses, order, *counts)
