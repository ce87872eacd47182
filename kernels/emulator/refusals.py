"""From what g++ and ld write to one sentence for each piece of a file that they refuse.

    for blamed in blame(text, source):
        blamed.piece, blamed.reason

A piece with an error is left out and the rest compiled again, so that one kernel which needs what
the emulator does not have leaves the file's other kernels usable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernels.scan import Piece
from kernels.source import Source

__all__ = ["ENTRIES", "TEXT_NAME", "Refusal", "absent_features", "blame", "first_reason"]

TEXT_NAME = "/emulator-build/source.cu"
"""What the compiler takes text for that is in no file."""
ENTRIES = "/emulator-build/entries"
"""And the loader's own lines, one for each kernel and variable."""

_INCLUDE = Path(__file__).parent / "include"
# Most telling first.
_FEATURES = (
    (r"\basm\b", "inline PTX (asm)"),
    (r"<<<", "kernels that launch kernels"),
    (r"\b(?:nv)?cuda::wmma\b|\bwmma::|\bmma_sync\b|nvcuda", "tensor cores (wmma)"),
    (
        r"\bcp_async|__pipeline_|\bmemcpy_async\b|cuda::pipeline|cuda::barrier",
        "asynchronous copies",
    ),
    (r"__nv_fp8|__nv_fp4|cuda_fp8", "numbers of 8 or 4 bits (fp8, fp4)"),
    (r"\btex[123]D|\btexture\s*<|cudaTextureObject_t|\bsurf[123]D|cudaSurfaceObject_t", "textures"),
    (r"\bcluster_group|this_cluster|__cluster_dims__", "clusters"),
    (r"\bcub::", "CUB (cub::)"),
    (r"\bthrust::", "Thrust (thrust::)"),
    (r"\bcurand", "cuRAND"),
    (r"\bcutlass\b|\bcute::", "CUTLASS"),
    (r"\b(?:at|c10|torch)::", "PyTorch's C++ headers"),
    (r"\bcuda::", "libcu++ (cuda::)"),
    (r"\b(?:cu)?(?:Float|Double)?[cC]omplex\b|\bcuC(?:add|mul|div|abs)", "complex numbers"),
    (
        r"\bcuda(?:Malloc|Free|Memcpy|DeviceSynchronize|Get|Stream|Event)\w*",
        "the host's CUDA functions",
    ),
    (r"\bcoalesced_threads|grid_group|this_grid", "this part of cooperative groups"),
)
_LOCATION = re.compile(r"(?:.*?ld: )?(?:\S+: in function .*?:\s*)?([^:\n]+):(\d+):(?:\d+:)?\s*(.*)")
_UNKNOWN = re.compile(
    r"'([\w:~]+)'[^'`]*?(?:not declared|not been declared|not name a type|not a member)"
    r"|undefined reference to [`']([\w:~]+)"
)
_LOOKS_LIKE_CUDA = re.compile(r"__\w+|cuda\w+|\w*_sync|cg::\w+|atomic\w+|make_\w+\d")


@dataclass(frozen=True)
class Refusal:
    """Why a piece is left out."""

    piece: Piece | None
    """None: an entry."""
    entry: int
    """The number of the entry's line, from 1."""
    reason: str
    missing: str = ""
    """The name that was not declared."""


def absent_features(source: Source) -> Iterator[Refusal]:
    """Pieces that g++ would misunderstand: PTX, which is no assembly of this processor."""
    for piece in source.pieces:
        if piece.kind not in ("kernel", "device", "type"):
            continue
        for pattern, feature in _FEATURES[:2]:
            if found := re.search(pattern, piece.text):
                line = piece.first_line + piece.text.count("\n", 0, found.start())
                yield Refusal(
                    piece,
                    0,
                    f"the emulator does not have {feature}: " + _place(source, piece.path, line),
                )
                break


def blame(text: str, source: Source) -> list[Refusal]:
    """A refusal for each piece or entry that an error of g++ or ld lies in."""
    found: dict[tuple[Piece | None, int], Refusal] = {}
    for name, line, message in _errors(text, source):
        entry = line if name == ENTRIES else 0
        pieces: Sequence[Piece | None] = [None] if entry else _pieces_at(source, name, line)
        for piece in pieces:
            # Of a parameter whose type is not known g++ first says that the function is void.
            if (piece, entry) not in found or "declared void" in found[piece, entry].reason:
                found[piece, entry] = _refusal(source, piece, entry, line, message)
    return list(found.values())


def first_reason(
    name: str, refusals: Mapping[Piece, Refusal], refusal: Refusal, depth: int = 4
) -> str:
    """The reason, or that of the piece whose absence it complains of."""
    for piece, other in refusals.items():
        defines = re.search(
            rf"\b{re.escape(refusal.missing)}\b", piece.text.partition("{")[0] or piece.text
        )
        if refusal.missing and depth and other is not refusal and defines:
            return first_reason(name, refusals, other, depth - 1)
    return refusal.reason.replace("{name}", name)


def _errors(text: str, source: Source) -> Iterator[tuple[str, int, str]]:
    """(file, line, message), in the user's files or the entries."""
    own = {_path_name(piece.path) for piece in source.pieces} | {ENTRIES}
    context: tuple[str, int] | None = None
    waiting = ""
    for written in text.splitlines():
        match = _LOCATION.match(written)
        if not match:
            continue
        name, line, rest = match[1], int(match[2]), match[3]
        is_error = re.match(r"(?:fatal )?error: |undefined reference to ", rest)
        message = re.sub(r"^(?:fatal )?error: ", "", rest)
        if is_error and name in own:
            yield name, line, message
            context, waiting = None, ""
        elif is_error and context:
            yield *context, message
            context, waiting = None, ""
        elif is_error:
            waiting = message
        elif name in own and waiting:
            yield name, line, waiting
            context, waiting = None, ""
        elif name in own and "note:" not in rest:
            context = (name, line)


def _pieces_at(source: Source, name: str, line: int) -> list[Piece]:
    at = [
        piece
        for piece in source.pieces
        if piece.kind != "brace"
        and _path_name(piece.path) == name
        and piece.first_line <= line <= piece.last_line
    ]
    return at


def _refusal(source: Source, piece: Piece | None, entry: int, line: int, message: str) -> Refusal:
    unknown = _UNKNOWN.search(message)
    missing = (unknown[1] or unknown[2] or "") if unknown else ""
    if piece is None:
        overloaded = "overload" in message or "no matches converting" in message
        reason = (
            "kernel {name} is overloaded" if overloaded else f"g++ did not accept it: {message}"
        )
        return Refusal(None, entry, reason, missing)
    place = _place(source, piece.path, line)
    text = _line(source, piece.path, line)
    if "emulator does not have" in message:
        return Refusal(piece, 0, f"{message.removeprefix('static assertion failed: ')}: {place}")
    for pattern, feature in _FEATURES:
        if re.search(pattern, text) or re.search(pattern, message):
            return Refusal(piece, 0, f"the emulator does not have {feature}: {place}", missing)
    if missing and _LOOKS_LIKE_CUDA.fullmatch(missing):
        return Refusal(piece, 0, f"the emulator does not have {missing}: {place}", missing)
    reason = f"g++ did not accept {place}: {message}"
    ours = {path.name for path in _INCLUDE.rglob("*.h")}
    absent = [name for name in source.missing_headers if Path(name).name not in ours]
    if (missing or "no arguments to" in message) and absent:
        reason += f" (it includes files that are not there: {', '.join(absent[:3])})"
    return Refusal(piece, 0, reason, missing)


def _place(source: Source, path: Path | None, line: int) -> str:
    name = path.name if path else source.display_name
    return f"{name}:{line} ({_line(source, path, line)})"


def _line(source: Source, path: Path | None, line: int) -> str:
    text = source.text if path == source.path else path.read_text(errors="replace") if path else ""
    lines = text.splitlines()
    return lines[line - 1].strip()[:120] if 0 < line <= len(lines) else ""


def _path_name(path: Path | None) -> str:
    return str(path) if path else TEXT_NAME
