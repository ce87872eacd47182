"""Compiling into a cache: each (source, defines, compiler) once, whoever asks at the same time.

    folder = build(parts, ("matmul.so",), compile)  # compile(folder) writes folder / "matmul.so"

What is built lies in a folder named by a hash of everything that goes into it, under
`$XDG_CACHE_HOME/ultra-scale-kernels` (`~/.cache` by default), or in a temporary folder where that
cannot be written, belongs to someone else or may be written by others: libraries are loaded from
it. A build happens in a folder of its own, which is then renamed: two processes may both compile,
and both end up with a whole one. What is whole is never removed; delete the folder to start anew.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from kernels.errors import CompileError

__all__ = ["build", "cache_folder", "compiler_version", "run_compiler"]

_MAX_ERROR_LINES = 30


def cache_folder() -> Path:
    """Where compiled kernels are kept; made if it is not there.

    Raises:
        CompileError: there is no folder that is safe to load libraries from.
    """
    own = Path(tempfile.gettempdir()) / f"ultra-scale-kernels-{os.getuid()}"
    try:
        # RuntimeError: the user has neither HOME nor an entry in the list of users.
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return _private(Path(base) / "ultra-scale-kernels")
    except (OSError, RuntimeError) as error:
        try:
            return _private(own)
        except OSError:
            raise CompileError(
                f"there is no place for compiled kernels ({error}), and {own} cannot be written, "
                "belongs to someone else or may be written by others; set XDG_CACHE_HOME to a "
                "folder of yours"
            ) from None


def _private(folder: Path) -> Path:
    """The folder, made if it is not there; OSError if others may write it, or we may not."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} belongs to someone else or may be written by others")
    with tempfile.TemporaryFile(dir=folder):
        return folder


def build(
    parts: Sequence[str], products: tuple[str, ...], compile_into: Callable[[Path], None]
) -> Path:
    """The folder that holds `products`, compiled now or before.

    Args:
        parts: everything that the result depends on.
        products: names of the files that a finished folder holds.
        compile_into: called with a new folder, and makes the products there.
    """
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    cache = cache_folder()
    final = cache / digest
    if _is_whole(final, products):
        return final
    working = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
    try:
        compile_into(working)
        _publish(working, final, products)
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return final


def _is_whole(folder: Path, products: tuple[str, ...]) -> bool:
    return all((folder / product).exists() for product in products)


def _publish(working: Path, final: Path, products: tuple[str, ...]) -> None:
    """Rename, unless another process was first; a folder that lost a file is replaced."""
    for last in (False, True):
        try:
            working.rename(final)
            return
        except OSError:
            if _is_whole(final, products):
                return
            if last:
                raise
            shutil.rmtree(final, ignore_errors=True)


def compiler_version(compiler: str) -> str:
    """First line of `compiler --version`."""
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return (done.stdout or done.stderr).strip()


def run_compiler(command: Sequence[str], display: dict[str, str], what: str) -> None:
    """Run it; on failure raise what it wrote, with paths replaced by the names in `display`."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    text = (done.stderr + done.stdout).strip()
    for path, name in display.items():
        text = text.replace(path, name)
    lines = [line for line in text.splitlines() if not line.startswith("In file included from")]
    shown = "\n".join(lines[:_MAX_ERROR_LINES])
    left = len(lines) - _MAX_ERROR_LINES
    more = f"\n... and {left} more lines" if left > 0 else ""
    raise CompileError(f"{Path(command[0]).name} did not accept {what}:\n{shown}{more}")
