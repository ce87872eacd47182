"""Checks of arguments that all of `predict` shares: what was found, and what is expected.

    whole("seq_len", seq_len, minimum=1)
    flag("statistics", statistics)
    expect_type("layout", layout, ParallelLayout)

Left out: sizes out of a configuration file (`config_fields`, which knows the field's name there).
"""

from __future__ import annotations

__all__ = ["expect_type", "flag", "is_whole", "whole"]


def is_whole(value: object, minimum: int) -> bool:
    """Whether it is an int of at least `minimum`; True is not a number here."""
    return type(value) is int and value >= minimum


def whole(name: str, value: object, minimum: int) -> None:
    """ValueError unless `value` is an int of at least `minimum`."""
    if not is_whole(value, minimum):
        raise ValueError(f"{name} is {value!r}: expected a whole number of at least {minimum}")


def flag(name: str, value: object) -> None:
    """ValueError unless `value` is True or False."""
    if type(value) is not bool:
        raise ValueError(f"{name} is {value!r}: expected True or False")


def expect_type(name: str, value: object, expected: type) -> None:
    """TypeError unless `value` is an instance of `expected`."""
    if not isinstance(value, expected):
        found = f"{name} is {value!r}, a {type(value).__name__}"
        raise TypeError(f"{found}: expected {expected.__name__}")
