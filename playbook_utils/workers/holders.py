"""Which global, argument or attribute holds what cannot be sent between processes.

    raise TypeError(unsendable(fn, args, error))
    # "global `logf` of train holds an open file, which cannot be sent to workers: ..."

Pickle names only the type it stopped at. Here it stops once more, at the object itself, and the
shortest way to that object is looked for from the function and its arguments: globals and closures
that the function uses, defaults, attributes, elements.

Left out: an object that exists only while its holder is being pickled; its type is named.
"""

from __future__ import annotations

import contextlib
import functools
import io
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import cloudpickle
import torch

from playbook_utils.workers.raised import cut

__all__ = ["unreturnable", "unsendable"]

MAX_OBJECTS = 50_000
MAX_ERROR_CHARS = 300
_KINDS = {
    "lock": "a lock",
    "RLock": "a lock",
    "generator": "a generator",
    "ProcessGroup": "a process group",
}

_Place = tuple[object, str, str, str]
"""An object, whose it is ("global `model` of train"), the name there ("model"), and the way on."""


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


class _Watched(cloudpickle.Pickler):  # type: ignore[misc]
    """Remembers the object it is at."""

    at: object = None

    def reducer_override(self, obj: Any) -> Any:
        self.at = obj
        if isinstance(obj, torch.Tensor):  # its numbers can always be sent, and may be many
            return torch.Tensor, ()
        return super().reducer_override(obj)


def unsendable(fn: object, args: tuple[object, ...], error: Exception) -> str:
    """Why the function or its arguments cannot be pickled, and what to do."""
    roots = [("the function", fn), *((f"argument {i}", arg) for i, arg in enumerate(args, 1))]
    found = _holder(roots, error) or f"the function or its arguments hold something{_said(error)}"
    return f"{found}, which cannot be sent to workers: make it inside the function"


def unreturnable(result: object, error: Exception) -> str:
    """Why a result cannot be pickled, and what to do."""
    found = _holder([("the result", result)], error) or f"the result holds something{_said(error)}"
    return f"{found}, which cannot be sent back: return tensors, numbers or objects made of them"


def _said(error: Exception) -> str:
    return f" ({cut(f'{type(error).__name__}: {error}', MAX_ERROR_CHARS)})"


def _holder(roots: list[tuple[str, object]], error: Exception) -> str | None:
    """Who holds the object at which pickle stops, and where."""
    pickler = _Watched(_Nowhere(), protocol=5)
    try:
        pickler.dump([obj for _, obj in roots])
    except Exception as again:
        if "recursion" in str(again):  # where it stopped is where it happened to run out
            return None
    waiting = deque[_Place]((obj, whose, "", "") for whose, obj in roots)
    seen: set[int] = set()
    while waiting and len(seen) < MAX_OBJECTS:
        place = waiting.popleft()
        obj, whose, name, way = place
        if obj is pickler.at:
            return f"{whose} holds {_kind(obj, error)}" + (f" in `{name}{way}`" if way else "")
        if id(obj) not in seen:
            seen.add(id(obj))
            waiting.extend(_children(place))
    return None


def _kind(obj: object, error: Exception) -> str:
    if isinstance(obj, io.IOBase):
        return "an open file"
    name = obj.__name__ if isinstance(obj, type) else type(obj).__name__
    article = "the class" if isinstance(obj, type) else "an" if name[0] in "aeiouAEIOU" else "a"
    return _KINDS.get(name, f"{article} {name}{_said(error)}")


def _children(place: _Place) -> Iterator[_Place]:
    obj, whose, name, way = place
    if isinstance(obj, types.FunctionType):
        yield from _used(obj)
    elif isinstance(obj, type):
        if _by_value(obj):
            yield from ((v, f"class {obj.__name__}", obj.__name__, f".{n}") for n, v in _vars(obj))
    elif isinstance(obj, dict):
        yield from ((value, whose, name, f"{way}[{key!r:.40}]") for key, value in obj.items())
    elif isinstance(obj, (list, tuple, deque)):
        yield from ((value, whose, name, f"{way}[{i}]") for i, value in enumerate(obj))
    elif isinstance(obj, (set, frozenset)):
        yield from ((value, whose, name, f"{way}, an element") for value in obj)
    elif isinstance(obj, functools.partial):
        yield obj.func, "the function", "", ""
        yield from ((v, "the partial", "", f"args[{i}]") for i, v in enumerate(obj.args))
        yield from ((v, "the partial", "", f"{k}=") for k, v in obj.keywords.items())
    elif not isinstance(obj, types.ModuleType):
        for attribute in ("__func__", "__self__", "__wrapped__", "fget"):
            with contextlib.suppress(Exception):
                yield getattr(obj, attribute), whose, name, f"{way}.{attribute}"
        yield from ((value, whose, name, f"{way}.{n}") for n, value in _vars(obj))
        yield type(obj), whose, name, way


def _used(fn: types.FunctionType) -> Iterator[_Place]:
    """What a function that is sent by value takes along."""
    if not _by_value(fn):
        return
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not yet given a value
            yield cell.cell_contents, f"variable `{name}` around {fn.__name__}", name, ""
    for name in _names(fn.__code__):
        if name in fn.__globals__:
            yield fn.__globals__[name], f"global `{name}` of {fn.__name__}", name, ""
    for value in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
        yield value, f"a default value of {fn.__name__}", "", ""
    yield from ((v, fn.__name__, fn.__name__, f".{n}") for n, v in _vars(fn))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _by_value(obj: Any) -> bool:
    """Whether cloudpickle sends a function or class itself, not its name."""
    return obj.__module__ in (None, "__main__") or "<" in obj.__qualname__


def _vars(obj: object) -> list[tuple[str, object]]:
    try:
        return list(vars(obj).items())
    except TypeError:  # it has none
        return []
