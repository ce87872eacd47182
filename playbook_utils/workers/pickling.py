"""Moving functions, classes and tensors between a notebook and its workers.

cloudpickle sends what a cell defines by value. Five things are mended here:

* it renames the file of every function to "<dynamic-code>", which loses the cell's lines from
  tracebacks and `inspect`: the name is kept, and the cells' sources travel along;
* unpickling a result sets the attributes of a class anew, so that a counter kept on a class of
  the notebook would jump back: a class that is already here is left as it is;
* a tensor travels as its bytes (torch's own way costs a zip archive per tensor), always to the
  CPU, with its `.grad` and attributes; two names for one tensor stay one (tied weights);
* bytes of a page or more, of tensors and of NumPy arrays, are kept out of the pickle and never
  copied into it; where many arrive at once, the receiver's tensors are views of what arrived;
* what arrives by value is put into the worker's `__main__`, so that plain pickle (as in
  `all_gather_object`) finds the classes of a cell.

Left out: tensors that are views of one storage arrive as separate tensors, contiguous; one that
arrives as a view of a large payload cannot be resized.

    payload = dumps(obj)            # payload.data, payload.buffers, payload.sources
    obj = loads(payload.data, payload.buffers)
"""

from __future__ import annotations

import io
import linecache
import mmap
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import torch

from playbook_utils.workers.private import SET_CLASS, SKELETONS, classes_by_id, code_reduce

__all__ = ["Payload", "add_sources", "dumps", "fill_main", "loads"]

OUT_OF_BAND_BYTES = mmap.PAGESIZE
"""Smaller buffers are part of the pickle: each would cost more to handle than to copy."""
VIEWS_FROM_BYTES = 16 << 20
"""Tensors of less than that in all are copied on arrival, so that they can be resized."""


@dataclass(frozen=True)
class Payload:
    """A pickled object and the cells it came from."""

    data: memoryview
    buffers: list[memoryview] = field(default_factory=list)
    """The memory of large tensors and arrays, in the order in which `loads` wants it."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """{file name: text} of the code that no file holds."""
    names: frozenset[str] = frozenset()
    """What the code of the functions calls things: globals, attributes, imports."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, out_of_band: bool) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._keep if out_of_band else None)
        self.buffers: list[memoryview] = []
        self.code_files: set[str] = set()
        self.names: set[str] = set()

    def _keep(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether a buffer is to be part of the pickle."""
        raw = buffer.raw()
        if raw.nbytes < OUT_OF_BAND_BYTES:
            return True
        self.buffers.append(raw)
        return False

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):
            self.code_files.add(obj.co_filename)
            self.names.update(obj.co_names)
            return _reduce_code(obj)
        if isinstance(obj, types.FunctionType):
            self.names.update(obj.__code__.co_names)  # also of one that travels by its name only
        if type(obj) in (torch.Tensor, torch.nn.Parameter) and obj.layout is torch.strided:
            return _reduce_tensor(obj)
        return super().reducer_override(obj)


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    make, args = code_reduce(code)
    return make, tuple(code.co_filename if arg == "<dynamic-code>" else arg for arg in args)


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    if tensor.is_quantized or tensor.is_nested or tensor.device.type == "meta":
        return NotImplemented
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    content: Any = flat.resolve_conj().resolve_neg().view(torch.uint8).numpy()
    raw = pickle.PickleBuffer(content)
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    requires_grad = tensor.requires_grad and tensor.is_leaf
    grad = tensor.grad if tensor.is_leaf else None
    shape, attributes = tuple(tensor.shape), tensor.__dict__  # marks, such as `sequence_parallel`
    return _make_tensor, (
        raw, tensor.dtype, shape, requires_grad, is_parameter, grad, attributes,
    )  # fmt: skip


def _make_tensor(
    raw: bytearray | memoryview,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    requires_grad: bool,
    is_parameter: bool,
    grad: torch.Tensor | None,
    attributes: dict[str, Any],
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype)
    if raw:
        storage = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
        tensor.set_(storage, 0, shape)  # type: ignore[call-overload]
    if not (isinstance(raw, memoryview) and memoryview(raw.obj).nbytes >= VIEWS_FROM_BYTES):
        tensor = torch.empty(shape, dtype=dtype).copy_(tensor.view(shape))
    if is_parameter:
        tensor = torch.nn.Parameter(tensor, requires_grad=requires_grad)
    else:
        tensor.requires_grad_(requires_grad)
    tensor.grad = grad
    tensor.__dict__.update(attributes)
    return tensor


class _Unpickler(pickle.Unpickler):
    """Leaves classes that this process already has as they are."""

    def __init__(self, data: bytes | bytearray | memoryview, buffers: Iterable[memoryview]) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._new_classes: set[type] = set()

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if module == "cloudpickle.cloudpickle":
            if name in SKELETONS:
                return self._noting_new(found)
            if name == SET_CLASS:
                return lambda cls, state: found(cls, state) if cls in self._new_classes else cls
        return found

    def _noting_new(self, make_class: Callable[..., type]) -> Callable[..., type]:
        def make(*args: Any) -> type:
            before = set(classes_by_id.values())
            cls = make_class(*args)
            if cls not in before:
                self._new_classes.add(cls)
            return cls

        return make


def dumps(obj: Any, *, out_of_band: bool = False) -> Payload:
    """Pickle `obj`; raises what its parts raise where they cannot be pickled.

    Args:
        out_of_band: give the memory of large tensors and arrays beside the pickle, not in it.
            It is the object's own where that is contiguous and on the CPU: use it at once.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, out_of_band)
    pickler.dump(obj)
    sources = {}
    for name in pickler.code_files:
        lines = [] if os.path.exists(name) else linecache.getlines(name)
        if lines:
            sources[name] = "".join(lines)
    return Payload(file.getbuffer(), pickler.buffers, sources, frozenset(pickler.names))


def loads(data: bytes | bytearray | memoryview, buffers: Iterable[memoryview] = ()) -> Any:
    """Unpickle, leaving classes that this process already has as they are."""
    return _Unpickler(data, buffers).load()


def add_sources(sources: Mapping[str, str]) -> None:
    """Make `linecache`, and so tracebacks and `inspect`, know the notebook's cells."""
    for name, text in sources.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


def fill_main(fn: Callable[..., Any]) -> None:
    """Put what came by value from the notebook's `__main__` into this process's `__main__`."""
    main = sys.modules["__main__"].__dict__
    plain = getattr(fn, "__wrapped__", fn)
    plain = getattr(plain, "func", plain)  # functools.partial
    if getattr(plain, "__module__", None) == "__main__" and hasattr(plain, "__globals__"):
        main[plain.__name__] = plain
        for name, value in plain.__globals__.items():
            if not name.startswith("__"):
                main[name] = value  # also `main` and `kernel`, which the server's own start has
    for cls in list(classes_by_id.values()):
        if cls.__module__ == "__main__" and "." not in cls.__qualname__:
            main[cls.__name__] = cls
