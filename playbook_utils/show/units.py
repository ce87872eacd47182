"""Numbers as text: bytes, counts and ratios, in few digits.

bytes_text(1536)            # "1.5 KiB"
number_text(16384)          # "16,384"
ratio_text(16384, 16384)    # "1.000"
"""

from __future__ import annotations

import math
from numbers import Integral, Real

__all__ = ["bytes_text", "bytes_unit", "is_number", "number_text", "ratio_text"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_text(n: float) -> str:
    """A number of bytes in the largest binary unit that keeps it at 1 or more: "16 MiB"."""
    if not is_number(n) or not math.isfinite(n):
        raise TypeError(f"expected a finite number of bytes, got {n!r}")
    scale, unit = bytes_unit(abs(float(n)) * 1024 / 1023.5)  # 1,023.5 KiB would read 1024 KiB
    value = float(n) / scale
    decimals = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    text = f"{value:.{decimals}f}"
    return f"{text.rstrip('0').rstrip('.') if decimals else text} {unit}"


def is_number(value: object) -> bool:
    """Whether it is an int or a float, of Python or of NumPy, and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral)


def bytes_unit(largest: float) -> tuple[int, str]:
    """(bytes in one unit, the unit's name) for an axis that reaches up to `largest` bytes."""
    last = len(_UNITS) - 1
    unit = next((i for i in range(last) if largest < 1024 ** (i + 1)), last)
    return 1024**unit, _UNITS[unit]


def number_text(value: float) -> str:
    """Integers in full with thousands separators, other numbers in four digits."""
    if _is_whole(value):
        return f"{int(value):,}"
    number = float(value)
    if not math.isfinite(number) or number == 0:
        return f"{number:g}"
    magnitude = math.floor(math.log10(abs(number)))
    if magnitude < -3:
        return f"{number:.2e}"
    return f"{number:,.{max(0, 3 - magnitude)}f}"


def ratio_text(first: float, second: float, name: str = "formula") -> str:
    """second / first in three decimals; "both 0", or "formula 0" (the first one's name) for none.

    Two different integers never read "1.000": they get the digits that part them.
    """
    if first == 0:
        return "both 0" if second == 0 else f"{name} 0"
    ratio = float(second) / float(first)
    if _is_whole(first) and _is_whole(second) and first != second:
        # Integers below 2**53 that differ have ratios that differ from 1 within 16 digits.
        decimals = next((d for d in range(3, 17) if round(ratio, d) != 1), 16)
        return f"{ratio:.{decimals}f}"
    return f"{ratio:.3f}"
