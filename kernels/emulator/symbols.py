"""Variables and code of a compiled kernel, from the symbol table of its library (ELF, 64 bits).

Shared arrays are thread-local variables to the C++ compiler (`include/cuda_runtime.h`), and
`__device__` variables are ordinary ones.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Symbol", "read_symbols"]

_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOL_TABLE = 2  # SHT_SYMTAB
_KINDS = {1: "variable", 2: "function", 6: "shared"}  # STT_OBJECT, STT_FUNC, STT_TLS


@dataclass(frozen=True)
class Symbol:
    """A function, or a variable with static storage."""

    symbol: str
    """As the linker sees it."""
    name: str
    """As in the source: "tile"; for a variable only."""
    kind: str
    """"variable", "function" or "shared"."""
    offset: int
    """From where the library is loaded; of a shared array, from the start of shared memory."""
    size_bytes: int


def read_symbols(library: Path) -> tuple[Symbol, ...]:
    """All of a library or object file, in the order of their place."""
    data = library.read_bytes()
    (table_offset,) = struct.unpack_from("<Q", data, 0x28)
    entry_bytes, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [_SECTION.unpack_from(data, table_offset + i * entry_bytes) for i in range(count)]
    found = set()
    for section in sections:
        _, kind, _, _, start, size, link, _, _, _ = section
        if kind != _SYMBOL_TABLE:
            continue
        strings = sections[link][4]
        for at in range(start, start + size, _SYMBOL.size):
            name_at, info, _, index, value, size_bytes = _SYMBOL.unpack_from(data, at)
            if info & 15 not in _KINDS or size_bytes == 0 or index == 0:
                continue
            end = data.index(b"\0", strings + name_at)
            symbol = data[strings + name_at : end].decode()
            name = source_name(symbol)
            found.add(Symbol(symbol, name, _KINDS[info & 15], value, size_bytes))
    return tuple(sorted(found, key=lambda s: (s.kind, s.offset, s.name)))


def source_name(symbol: str) -> str:
    """The variable's name in C++: `_ZZ6kernelPfE4tile` is "tile" (Itanium ABI, local names)."""
    if symbol.startswith("_Z"):
        # The variable's own name comes last, after the E that closes the function's.
        for match in re.finditer(r"(\d+)(?=[A-Za-z_])", symbol):
            start = match.end()
            name = symbol[start : start + int(match[1])]
            rest = symbol[start + int(match[1]) :]
            if len(name) == int(match[1]) and re.fullmatch(r"(_\d+|__\d+_|E)?", rest):
                return name
        return symbol
    return re.sub(r"\.\d+$", "", symbol)
