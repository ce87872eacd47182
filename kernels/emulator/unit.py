"""The C++ that g++ compiles for a .cu file: its kept pieces, and entries for Python.

Pieces keep their line numbers (`# 12 "file.cu"`), so that reports, errors and the debug information
speak of the file as it was written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from kernels.described import entries
from kernels.emulator.refusals import (
    ENTRIES,
    TEXT_NAME,
    Refusal,
    absent_features,
    blame,
    first_reason,
)
from kernels.errors import CompileError
from kernels.scan import Piece
from kernels.source import Source, without_attributes

__all__ = ["Unit"]

_INCLUDE_FOLDER = Path(__file__).parent / "include"
_INCLUDE = re.compile(r"\s*#\s*include\s*[\"<]([^\">]+)[\">]")
# For the host alone, and slow to compile.
_HOST_HEADERS = (
    *("iostream", "fstream", "sstream", "iomanip", "random", "chrono"),
    *("thread", "mutex", "future", "filesystem", "regex"),
)
# Of libraries that are not here, but whose headers declare half and bfloat16.
_BRING_16_BITS = ("cublas", "cudnn", "mma", "cub/", "cute/", "cutlass/", "torch/", "ATen/", "c10/")
_DYNAMIC = re.compile(
    r"\b(?:extern\s+(?:volatile\s+)?__shared__|__shared__\s+extern)\s+([^;{}]+?)\b(\w+)\s*\[\s*\]\s*;"
)
_CALL = (
    'extern "C" EMULATOR_UNCOUNTED void emulator_call_{name}(void** arguments) '
    "{{ emulator::call({expression}, arguments); }} "
    'extern "C" EMULATOR_UNCOUNTED void* emulator_address_{name}() '
    "{{ return reinterpret_cast<void*>(&{expression}); }} "
)
_VARIABLE = (
    'extern "C" EMULATOR_UNCOUNTED const void* emulator_variable_{number}() '
    "{{ return const_cast<const void*>(static_cast<const volatile void*>(&{name})); }} "
)


class Unit:
    """The text, with what was found to be refused left out."""

    def __init__(self, source: Source, expressions: Mapping[str, str]) -> None:
        self._source = source
        self._expressions = dict(expressions)
        self._refusals = {r.piece: r for r in absent_features(source) if r.piece is not None}
        self._dead_entries: dict[int, Refusal] = {}

    def text(self) -> str:
        """All of it."""
        kept = [
            f'# {piece.first_line} "{piece.path or TEXT_NAME}"\n{_for_cpu(piece)}'
            for piece in self._source.pieces
            if piece not in self._refusals
        ]
        arena = (
            "alignas(128) thread_local unsigned char "
            "emulator_dynamic_shared[EMULATOR_DYNAMIC_BYTES];"
        )
        head = ['#include "describe.h"', '#include "call.h"', arena]
        tail = [
            f'# {number} "{ENTRIES}"\n{line}'
            for number, line in enumerate(self._entries(), 1)
            if number not in self._dead_entries
        ]
        return "\n".join([*kept, f'# 1 "{ENTRIES}-head"', *head, *tail, ""])

    def leave_out(self, errors: str) -> None:
        """What these errors lie in.

        Raises:
            CompileError: nothing was found, or no kernel is left.
        """
        found = blame(errors, self._source)
        for refusal in found:
            if refusal.piece is not None:
                self._refusals[refusal.piece] = refusal
            self._dead_entries[refusal.entry] = refusal
        if not found:
            first = next((x for x in errors.splitlines() if "error" in x), errors[:200])
            raise CompileError(f"g++ did not accept {self._source.display_name}: {first}")
        refused = self.refused()
        if len(refused) == len(self._source.kernels):
            reasons = list(dict.fromkeys(refused.values()))
            raise CompileError("\n".join(reasons[:3]))

    def refused(self) -> dict[str, str]:
        """{kernel: why it is not there}; those without an expression are not spoken of."""
        found = {}
        for piece, refusal in self._refusals.items():
            if piece.kind == "kernel":
                found[piece.name] = first_reason(piece.name, self._refusals, refusal)
        names = list(self._expressions)
        for entry, refusal in self._dead_entries.items():
            if 0 < entry <= len(names):
                reason = first_reason(names[entry - 1], self._refusals, refusal)
                found.setdefault(names[entry - 1], reason)
        return found

    def _entries(self) -> list[str]:
        described = entries(self._source, self._expressions, "EMULATOR_UNCOUNTED")
        calls = [_CALL.format(name=n, expression=e) for n, e in self._expressions.items()]
        calls += [
            _VARIABLE.format(number=number, name=name)
            for number, name in enumerate(self._source.symbols)
        ]
        return [call + line for call, line in zip(calls, described, strict=True)]


def _for_cpu(piece: Piece) -> str:
    if piece.kind == "directive":
        found = _INCLUDE.match(piece.text)
        return _include(found[1]) if found else piece.text
    text = re.sub(r"(?<!\()\b__noinline__\b", "EMULATOR_NOINLINE", piece.text)
    return _DYNAMIC.sub(_dynamic_at_top if "{" not in text else _dynamic, text)


def _include(name: str) -> str:
    """Our own header, or one of C++; of all others nothing is here."""
    if (_INCLUDE_FOLDER / name).is_file():
        return f'#include "{name}"'
    if name.startswith(_BRING_16_BITS):
        return '#include "cuda_fp16.h"\n#include "cuda_bf16.h"'
    if "/" in name or name in _HOST_HEADERS:
        return ""
    return f"#if __has_include(<{name}>)\n#include <{name}>\n#endif"


def _dynamic(match: re.Match[str]) -> str:
    """In a function: a reference to the one array that all of them are."""
    kind = without_attributes(match[1]).strip()
    lines = "\n" * match[0].count("\n")
    return (
        f"auto& {match[2]} = reinterpret_cast<{kind} (&)[EMULATOR_DYNAMIC_BYTES / sizeof({kind})]>"
        f"(emulator_dynamic_shared);{lines}"
    )


def _dynamic_at_top(match: re.Match[str]) -> str:
    return match[0].rstrip(";").rstrip() + ' asm("emulator_dynamic_shared");'
