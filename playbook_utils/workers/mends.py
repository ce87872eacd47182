"""Three traps of Python and PyTorch, taken out of each worker.

* `input()` and debuggers in a rank say that there is no keyboard, and what to do instead.
* To send to a rank that the group does not have is an error; PyTorch hands it on to gloo, which
  crashes, or waits in vain.
* A process that a rank starts anew ("spawn", "forkserver": a DataLoader may) gets the classes and
  functions of cells by value; plain pickle sends names, which it could not look up.

    mend()        # once, in a worker

Left out: processes that torchrun started, which are the script's own.
"""

from __future__ import annotations

import io
import sys
from collections import ChainMap
from multiprocessing import process, reduction
from typing import Any, NoReturn

import cloudpickle
import torch.distributed as dist
from torch.distributed import distributed_c10d

from playbook_utils.workers import pickling, private

__all__ = ["mend"]


def mend() -> None:
    """Take the three traps out of this process."""
    sys.stdin = _NoKeyboard(open(0, "rb", closefd=False))  # noqa: SIM115 (lives as long as we)
    sys.breakpointhook = sys.stdin.readline
    name = private.group_rank.__name__
    setattr(distributed_c10d, name, _present(private.group_rank))
    reduction.dump = _dump_by_value


class _NoKeyboard(io.TextIOWrapper):
    def readline(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "a rank has no keyboard for input() or a debugger: print() what you want to see, pass "
            "as an argument what you would type, or call the function without launch()"
        )

    read = __next__ = readline


def _present(peer_of: Any) -> Any:
    def checked(group: Any, *args: Any, return_global: bool = False, **kwargs: Any) -> Any:
        peer = peer_of(group, *args, return_global=return_global, **kwargs)
        if isinstance(group, dist.ProcessGroup) and not return_global:
            last = group.size() - 1
            if not 0 <= peer <= last:
                raise ValueError(f"found peer {peer}, expected a rank of this group, 0 to {last}")
        return peer

    return checked


def _dump_by_value(obj: Any, file: Any, protocol: int | None = None) -> None:
    """multiprocessing's own, with cloudpickle's ways for what only cells define."""
    plain = reduction.ForkingPickler(io.BytesIO()).dispatch_table
    # An attribute of the class: pickle does not look at an instance's own.
    table = {"dispatch_table": ChainMap(plain, cloudpickle.Pickler.dispatch_table)}
    by_value = type("ByValue", (cloudpickle.Pickler,), table)
    by_value(file, protocol).dump(_Started(obj) if isinstance(obj, process.BaseProcess) else obj)


class _Started:
    """A process object, to whose new interpreter the cells' classes are made known first."""

    def __init__(self, started: process.BaseProcess) -> None:
        self._started = started

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self._started,)


def _arrive(started: Any) -> Any:
    pickling.fill_main(started.run)
    return started
