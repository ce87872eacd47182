"""Which of the user's own `.py` files changed after this process imported them.

Ranks import such a file as it is now, and would run other code than the kernel has. Python keeps
of a file only what its compiled copy says (time and size); that is taken when a module is first
seen here, and again when it was reloaded.

Left out: libraries, this package, notebooks (which refuse by themselves), `__main__`.

    Modules().edited()        # ["/home/me/model.py"]
"""

from __future__ import annotations

import importlib.util
import os
import struct
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader

import psutil

from playbook_utils.workers.report import library_folders

__all__ = ["Modules"]

Stamp = tuple[int, int]
"""Time of the last change in seconds and size in bytes, each modulo 2**32."""


class Modules:
    """What the imported files of this process were."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[ModuleSpec | None, Stamp | None]] = {}

    def edited(self) -> list[str]:
        """The files that are no longer what was imported."""
        found = []
        for name, module in list(sys.modules.items()):
            spec = getattr(module, "__spec__", None)
            if name not in self._seen or self._seen[name][0] is not spec:
                self._seen[name] = spec, _imported(spec)
            stamp = self._seen[name][1]
            if stamp is not None and spec is not None and _now(spec.origin) not in (stamp, None):
                found.append(spec.origin or name)
        return found


def _imported(spec: ModuleSpec | None) -> Stamp | None:
    """What the file of a module was when it was imported; None for a library's."""
    if spec is None or spec.origin is None or not isinstance(spec.loader, SourceFileLoader):
        return None
    package = os.path.dirname(os.path.dirname(__file__))
    if os.path.abspath(spec.origin).startswith((package, *library_folders())):
        return None
    now = _now(spec.origin)
    # Older than this process: read as it is, whatever an old compiled copy says.
    if now is None or now[0] < int(psutil.Process().create_time()):
        return now
    try:
        with open(spec.cached or "", "rb") as file:
            magic, flags, seconds, size = struct.unpack("<4sIII", file.read(16))
    except (OSError, struct.error):
        return now
    return now if flags or magic != importlib.util.MAGIC_NUMBER else (seconds, size)


def _now(path: str | None) -> Stamp | None:
    try:
        status = os.stat(path or "")
    except OSError:
        return None
    return int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF
