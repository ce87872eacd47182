"""The names of `show`: each is there, and is no module."""

from __future__ import annotations

from types import ModuleType

import pytest

from playbook_utils import show


@pytest.mark.parametrize("name", show.__all__)
def test_each_name_is_there_and_is_no_module(name: str) -> None:
    value = getattr(show, name)
    assert callable(value) and not isinstance(value, ModuleType)


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(AttributeError, match="show has no name 'timelines_'; it has Canvas, "):
        _ = show.timelines_
