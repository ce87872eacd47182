"""Typed fields, several names, and what was left."""

from __future__ import annotations

import pytest

from playbook_utils.predict.config_fields import Fields


def test_sizes_defaults_and_what_is_left() -> None:
    fields = Fields({"a": 3, "b": None, "c": "x", "d": None})
    assert fields.size("a") == 3
    assert fields.size("b", default=7) == 7
    assert fields.unused == ("c",)  # null counts as absent
    assert fields.value("c") == "x"
    assert fields.unused == ()


def test_one_field_by_two_names() -> None:
    assert Fields({"old": 3}).size("new", "old") == 3
    assert Fields({"old": 3, "new": 3}).size("new", "old") == 3
    with pytest.raises(ValueError, match="new is 4 but old is 3: they are the same field"):
        Fields({"old": 3, "new": 4}).size("new", "old")
    with pytest.raises(ValueError, match="old is 0: expected a whole number from 1 to 1,000,000"):
        Fields({"old": 0}).size("new", "old")


@pytest.mark.parametrize("value", [0, 10, True, 3.0, "3"])
def test_sizes_have_bounds_and_a_type(value: object) -> None:
    with pytest.raises(ValueError, match=r"a is .*: expected a whole number from 1 to 9"):
        Fields({"a": value}).size("a", maximum=9)


def test_other_types() -> None:
    fields = Fields({"yes": True, "p": 0, "word": "b"})
    assert fields.flag("yes", default=False)
    assert fields.flag("no", default=True)
    assert fields.probability("p", 0.1) == 0.0
    assert fields.probability("q", 0.1) == 0.1
    assert fields.choice("word", choices={"a": "A", "b": "B"}, default="a") == "B"
    assert fields.choice("other", choices={"a": "A", "b": "B"}, default="a") == "A"
    with pytest.raises(ValueError, match="yes is True: expected a number from 0 to below 1"):
        fields.probability("yes", 0.0)
    with pytest.raises(ValueError, match="p is 0: expected true or false"):
        fields.flag("p", default=False)
    with pytest.raises(ValueError, match="word is 'b': expected one of c"):
        fields.choice("word", choices={"c": "C"}, default="c")
