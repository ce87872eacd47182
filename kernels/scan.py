"""Cuts C++ text into the items of its namespaces, by braces and semicolons.

    for piece in items_of(path, blank_comments(text), set()):
        piece.kind, piece.name, piece.first_line, piece.text

Knows as little of C++ as it needs to tell kernels and `__device__` code from host code. A file
whose braces do not match (two heads of one body under `#if` and `#else`) is one piece from there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Piece", "blank_comments", "items_of", "split_arguments"]

_COMMENT = re.compile(
    r"//(?:\\\n|[^\n])*|/\*.*?\*/|R\"([^()\s\\]*)\(.*?\)\1\"|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'",
    re.DOTALL,
)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:\\\n|[^\n])*", re.MULTILINE)
_CONDITION = re.compile(r"\s*#\s*(if|ifdef|ifndef|elif|else|endif)\b\s*(.*)")
_DEFINE = re.compile(r"\s*#\s*define\s+(\w+)[\s\S]*?__(device|global)__")
_NAMESPACE = re.compile(r"(?:inline\s+)?namespace\b\s*([\w:]*)\s*\{|extern\s*\"[^\"]*\"\s*\{")
_EXTERN_C = re.compile(r"extern\s*\"[^\"]*\"\s*")
_TYPE = re.compile(r"(?:typedef|using|namespace|struct|class|union|enum|static_assert)\b")
_CONSTANT = re.compile(r"(?:(?:static|inline|constexpr|const)\s+)*(?:constexpr|const)\b")
_DEVICE = re.compile(r"__(?:device|constant|shared|managed|global)__")
_OPENING = re.compile(r"(\w+)\s*(?:<[^()]*>\s*)?\(")
# What may have arguments between "__global__ void" and the kernel's name.
_NOT_NAMES = {"__launch_bounds__", "__attribute__", "__cluster_dims__", "__maxnreg__", "alignas"}


@dataclass(frozen=True)
class Piece:
    """A declaration, a definition, a directive, or the brace that opens or closes a namespace."""

    path: Path | None
    first_line: int
    text: str
    """With its comments blanked."""
    kind: str
    """"kernel", "device" (functions and variables), "type" (and constants), "directive", "brace";
    host code is left out."""
    scope: str = ""
    """Of the namespaces around it: "detail::"."""
    name: str = ""
    """Of a kernel."""

    @property
    def last_line(self) -> int:
        """Of its text."""
        return self.first_line + self.text.count("\n")

    def head(self) -> tuple[str, str, str]:
        """Of a kernel: its template's parameters, its name, its parameters."""
        return _head(self.text)


def blank_comments(text: str) -> str:
    """The same length and lines, with spaces for comments and for what stands under `#if 0`."""
    kept, depth = [], 0
    for line in _COMMENT.sub(_blank_comment, text).split("\n"):
        found = _CONDITION.match(line)
        word = found[1] if found else ""
        if depth == 0 and found and word == "if" and found[2].strip() in ("0", "false"):
            depth = 1
        elif depth and word.startswith("if"):
            depth += 1
        elif depth and (word == "endif" or (word in ("else", "elif") and depth == 1)):
            depth -= 1
            if not depth and word != "endif":
                line = "#if 1" if word == "else" else line.replace("elif", "if", 1)
                kept.append(line)
                continue
            line = "" if word == "endif" else line
        if depth or (word == "endif" and not line):
            line = " " * len(line)
        kept.append(line)
    return "\n".join(kept)


def _blank_comment(match: re.Match[str]) -> str:
    found = match[0]
    return found if found[0] in "\"'R" else _blank(found)


def _blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def items_of(path: Path | None, text: str, macros: dict[str, bool]) -> Iterator[Piece]:
    """The pieces to keep, in their order.

    `macros` gains those that stand for `__device__` (False) or for `__global__` (True).
    """
    directives = [found.span() for found in _DIRECTIVE.finditer(text)]
    for start, end in directives:
        if found := _DEFINE.match(text[start:end]):
            macros[found[1]] = found[2] == "global"
    # Strings and directives hold no braces and no words from here on.
    skeleton = _DIRECTIVE.sub(lambda found: _blank(found[0]), text)
    skeleton = _COMMENT.sub(lambda m: m[0][0] + _blank(m[0][1:-1]) + m[0][-1], skeleton)
    spans = [(*span, "directive", "") for span in directives]
    for start, end, scope in _scan(skeleton, 0, len(skeleton), ""):
        spans.append((start, end, "", scope))
    inside, line, counted = 0, 1, 0
    for start, end, given, scope in sorted(spans):
        kind = given or _kind(skeleton[start:end], macros)
        if kind == "host" or start < inside:
            continue
        if not given:
            inside = end
        line, counted = line + text.count("\n", counted, start), start
        name = _head(skeleton[start:end])[1] if kind == "kernel" else ""
        yield Piece(path, line, text[start:end], kind, scope, name)


def _scan(code: str, at: int, end: int, scope: str) -> Iterator[tuple[int, int, str]]:
    """(start, end, scope) of each item; a namespace's opening and its brace are items too."""
    while at < end:
        if code[at].isspace() or code[at] == ";":
            at += 1
        elif found := _NAMESPACE.match(code, at, end):
            yield at, found.end(), scope
            close = _closing(code, found.end() - 1, end)
            inner = f"{scope}{found[1]}::" if found[1] else scope
            yield from _scan(code, found.end(), close, inner)
            yield close, min(close + 1, end), scope
            at = close + 1
        else:
            stop = _item_end(code, at, end)
            yield at, stop, scope
            at = stop


def _item_end(code: str, start: int, end: int) -> int:
    at = start
    while at < end:
        if code[at] == ";":
            return at + 1
        if code[at] in "([":
            at = _closing(code, at, end)
        elif code[at] == "{":
            at = _closing(code, at, end)
            if _is_function(code[start:at].partition("{")[0]):
                return min(at + 1, end)
        at += 1
    return end


def _closing(code: str, at: int, end: int) -> int:
    """Where the bracket at `at` closes; `end` if it does not."""
    pairs = {"(": ")", "[": "]", "{": "}"}
    opening, close, depth = code[at], pairs[code[at]], 0
    for found in re.finditer(rf"[\{opening}\{close}]", code[at:end]):
        depth += 1 if found[0] == opening else -1
        if depth == 0:
            return at + found.start()
    return end


def _is_function(head: str) -> bool:
    """Whether a brace after this text is a body, after which no semicolon comes."""
    plain = _without_template(head)[1].strip()
    if _TYPE.match(plain):
        return plain.endswith(")") and not re.match(r"typedef|\w+\s+(?:__align__|alignas)", plain)
    outside = re.sub(r"\([^()]*\)", "", re.sub(r"operator\W+", "operator", plain))
    return ("(" in plain and "=" not in outside) or not plain


def _kind(item: str, macros: dict[str, bool]) -> str:
    head, _, body = item.partition("{")
    words = set(re.findall(r"\w+", head))
    if _NAMESPACE.match(item) or item == "}":
        return "brace"
    plain = _without_template(_EXTERN_C.sub("", head))[1].strip()
    if "__global__" in words or any(macros.get(word) for word in words):
        specialised = re.match(r"\s*template\s*<\s*>", head)
        if plain.startswith("template"):  # of an instance, which the loader makes itself
            return "host"
        return "kernel" if body and not specialised else "device"
    if any(_DEVICE.fullmatch(word) or word in macros for word in words) or "constexpr" in words:
        return "device"
    if _TYPE.match(plain):
        return "type"
    if _EXTERN_C.match(head) and not body:  # a function of the C library
        return "type"
    is_constant = _CONSTANT.match(plain) and not _is_function(head + " ")
    return "type" if is_constant and "(" not in plain.partition("=")[0] else "host"


def _without_template(text: str) -> tuple[str, str]:
    """What stands between the angle brackets of `template <...>`, and what comes after."""
    found = re.match(r"\s*template\s*<", text)
    if not found:
        return "", text
    depth, at = 1, found.end()
    while depth and at < len(text):
        depth += {"<": 1, ">": -1}.get(text[at], 0)
        at += 1
    return text[found.end() : at - 1], text[at:]


def _head(item: str) -> tuple[str, str, str]:
    """Of a function: its template's parameters, its name, its parameters."""
    template, plain = _without_template(_EXTERN_C.sub("", item.partition("{")[0]))
    close = 0
    while opening := _OPENING.search(plain, close):
        close = _closing(plain, opening.end() - 1, len(plain))
        if opening[1] not in _NOT_NAMES:
            return template, opening[1], plain[opening.end() : close]
    return template, "", ""


def split_arguments(text: str) -> list[str]:
    """Parts between commas that are in no bracket."""
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += {"(": 1, "[": 1, "{": 1, "<": 1, ")": -1, "]": -1, "}": -1, ">": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    return [part for part in (*parts, text[start:]) if part.strip()]
