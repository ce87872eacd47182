"""Who holds what cannot be sent: the way to it, from the function and its arguments."""

from __future__ import annotations

import functools
import io
import sqlite3
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from playbook_utils.workers import pickling
from playbook_utils.workers.holders import unreturnable, unsendable

LOCK = threading.Lock()
MODEL = torch.nn.Linear(1, 1)
MODEL.lock = LOCK


class FailsToPickle:
    def __getstate__(self) -> None:
        raise ValueError("no" + "x" * 10_000_000)


class Hidden:
    """Its lock exists while it is pickled."""

    def __reduce__(self) -> Any:
        return Hidden, (threading.RLock(),)


def why(fn: Callable[..., object], *args: object) -> str:
    with pytest.raises(Exception) as caught:
        pickling.dumps((fn, args))
    return unsendable(fn, args, caught.value)


def test_a_global_is_named() -> None:
    def nested() -> object:
        return [LOCK for _ in range(2)]

    cure = ", which cannot be sent to workers: make it inside the function"
    assert why(nested) == "global `LOCK` of nested holds a lock" + cure
    assert why(lambda: nested()).startswith("global `LOCK` of nested holds a lock,")
    assert why(lambda: MODEL).startswith("global `MODEL` of <lambda> holds a lock in `MODEL.lock`,")


def test_closures_defaults_and_partials_are_named() -> None:
    lock, log = threading.RLock(), io.TextIOWrapper(io.BytesIO())

    def closure() -> object:
        return lock

    def default(file: object = log) -> object:
        return file

    assert why(closure).startswith("variable `lock` around closure holds a lock,")
    assert why(default).startswith("a default value of default holds an open file,")
    assert "holds an open file in `file=`" in why(functools.partial(print, file=log))


def test_the_way_within_an_argument_is_shown() -> None:
    assert why(print, 1, {"log": [1, LOCK]}).startswith("argument 2 holds a lock in `['log'][1]`,")
    assert why(print, (i for i in ())).startswith("argument 1 holds a generator,")
    assert why(print, MODEL).startswith("argument 1 holds a lock in `.lock`,")


def test_methods_of_a_class_of_the_notebook_are_looked_into() -> None:
    class Trainer:
        def step(self) -> object:
            return LOCK

    assert why(print, Trainer()).startswith("global `LOCK` of step holds a lock,")
    assert why(Trainer().step).startswith("global `LOCK` of step holds a lock,")


def test_the_reason_is_told_where_the_kind_is_not_known() -> None:
    assert "a Connection (TypeError: cannot pickle" in why(print, sqlite3.connect(":memory:"))
    text = why(print, {"a": FailsToPickle()})
    assert "a FailsToPickle (ValueError: noxx" in text and "in `['a']`" in text
    assert "characters left out" in text and len(text) < 600


def test_what_cannot_be_found_is_not_guessed() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert "hold something (PicklingError" in why(print, deep)
    assert "hold something (TypeError: cannot pickle '_thread.RLock'" in why(print, Hidden())


def test_a_large_tensor_beside_it_is_not_copied() -> None:
    """Its numbers are not looked at: a tensor of 4 TB has none."""
    huge = torch.empty(1).expand(10**12)
    text = unreturnable([huge, LOCK], TypeError("cannot pickle"))
    assert text.startswith("the result holds a lock in `[1]`, which cannot be sent back")
