"""__launch_bounds__: the most threads of a block that a kernel was compiled for.

    check_bounds(source, {"TILE": "16"}, "matmul", configuration)

A GPU refuses a launch with more. The bound is computed from the text: whole numbers, macros and
constants of the file (`#define`, `const int`, `constexpr int`), + - * / % << >> and parentheses. A
bound that needs more than that is not checked.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping

from kernels.arguments import Configuration
from kernels.source import Source

__all__ = ["check_bounds"]

_NESTED = r"(?:[^(),]|\((?:[^()]|\([^()]*\))*\))+"
_BOUND = re.compile(rf"__launch_bounds__\s*\(\s*({_NESTED})")
_MACRO = re.compile(
    r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+(.+?)[ \t]*(?://.*|/\*.*)?$", re.MULTILINE
)
_CONSTANT = re.compile(
    r"\b(?:const|constexpr)\s+(?:static\s+)?(?:unsigned\s+)?(?:int|size_t|unsigned|uint32_t)\s+"
    r"(\w+)\s*=\s*([^;]+);"
)
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
_MAX_DEPTH = 20


def check_bounds(
    source: Source, values: Mapping[str, str], kernel: str, where: Configuration
) -> None:
    """Compare; `values` are what the file was loaded with, which count before its own macros.

    Raises:
        ValueError: the block is larger.
    """
    found = _bound_of(source.text, kernel)
    if found is None:
        return
    expression, line = found
    known = {**dict(_MACRO.findall(source.text)), **dict(_CONSTANT.findall(source.text)), **values}
    bound = _value(expression, known)
    x, y, z = where.block
    if bound is not None and x * y * z > bound:
        raise ValueError(
            f"kernel {kernel}: found a block of {x * y * z} threads, expected at most {bound}, by "
            f"__launch_bounds__({expression.strip()}) at {source.display_name}:{line}; a GPU "
            "refuses the launch"
        )


def _bound_of(text: str, kernel: str) -> tuple[str, int] | None:
    """The expression before a kernel's name, and its line."""
    for place in re.finditer(rf"\b{kernel}\s*\(", text):
        start = text.rfind("__global__", 0, place.start())
        between = text[start : place.start()]
        bound = _BOUND.search(between)
        if start >= 0 and bound and not re.search(r"[;{}]", between):
            return bound[1], text.count("\n", 0, start + bound.start()) + 1
    return None


def _value(text: str, known: Mapping[str, str], depth: int = 0) -> int | None:
    """None: not a number that can be told from here."""
    try:
        return _evaluated(ast.parse(text.strip(), mode="eval").body, known, depth)
    except (SyntaxError, KeyError, ValueError, ZeroDivisionError):
        return None


def _evaluated(node: ast.expr, known: Mapping[str, str], depth: int) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name) and depth < _MAX_DEPTH:
        value = _value(known[node.id], known, depth + 1)
        if value is not None:
            return value
    if isinstance(node, ast.BinOp):
        left, right = (_evaluated(side, known, depth) for side in (node.left, node.right))
        return _OPERATIONS[type(node.op)](left, right)
    raise ValueError
