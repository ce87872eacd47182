"""Private names of Triton: each is asked for, so that a release that moves one is named."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="made for Linux")

from kernels.triton import private
from kernels.triton.programs import ProgramLog, _watched


@pytest.mark.parametrize("name", private.NAMES)
def test_it_is_there(name: str) -> None:
    assert getattr(private, name) is not None


def test_one_that_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("triton.runtime.jit:Moved", "triton.moved:JITFunction"):
        monkeypatch.setitem(private.NAMES, "JITFunction", place)
        with pytest.raises(ImportError, match=f"{place} is not in this version of Triton"):
            private.JITFunction  # noqa: B018
    with pytest.raises(AttributeError, match="Unknown"):
        private.Unknown  # noqa: B018


def test_methods_of_the_interpreter_that_are_watched() -> None:
    for name in _watched(private.interpreter_builder, ProgramLog({})):
        assert callable(getattr(private.interpreter_builder, name)), name
