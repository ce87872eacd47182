"""Helpers for the course: start ranks, measure them, predict, check, show.

    from playbook_utils import launch, check, compare

gives the names that notebooks use every day, each loaded when it is first asked for:
`import playbook_utils.predict` never imports torch.

One thing happens at import: `from notebooks.data_parallelism import BucketedDDP` is made to work,
by an import hook that reads the cells marked `#| export` (see `playbook_utils.notebooks`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from playbook_utils import notebooks

if TYPE_CHECKING:
    from playbook_utils import show as show
    from playbook_utils.checks import assert_same_training as assert_same_training
    from playbook_utils.checks import check as check
    from playbook_utils.checks import record_training as record_training
    from playbook_utils.data import GeneratedLanguage as GeneratedLanguage
    from playbook_utils.data import StandardLibraryText as StandardLibraryText
    from playbook_utils.data import shard_batch as shard_batch
    from playbook_utils.measure import TraceRecorder as TraceRecorder
    from playbook_utils.measure import record_communication as record_communication
    from playbook_utils.model import Decoder as Decoder
    from playbook_utils.model import DecoderConfig as DecoderConfig
    from playbook_utils.workers import device as device
    from playbook_utils.workers import launch as launch
    from playbook_utils.workers import prewarm as prewarm

_HOMES = {
    "Decoder": "model",
    "DecoderConfig": "model",
    "GeneratedLanguage": "data",
    "StandardLibraryText": "data",
    "TraceRecorder": "measure",
    "assert_same_training": "checks",
    "check": "checks",
    "device": "workers",
    "launch": "workers",
    "prewarm": "workers",
    "record_communication": "measure",
    "record_training": "checks",
    "shard_batch": "data",
    "show": "",
}

__all__ = sorted(_HOMES)  # pyright: ignore


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(
            f"playbook_utils has no name {name!r}; at the top it has {', '.join(__all__)}"
        )
    home = _HOMES[name]
    if not home:
        return importlib.import_module(f"playbook_utils.{name}")
    return getattr(importlib.import_module(f"playbook_utils.{home}"), name)


def __dir__() -> list[str]:
    return __all__


notebooks.install()
