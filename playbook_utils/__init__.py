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

_NAMES = {
    "checks": ("assert_same_training", "check", "record_training"),
    "data": ("GeneratedLanguage", "StandardLibraryText", "shard_batch"),
    "measure": ("TraceRecorder", "record_communication"),
    "model": ("Decoder", "DecoderConfig"),
    "show": ("show",),
    "workers": ("device", "launch", "prewarm"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOMES)  # pyright: ignore


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(
            f"playbook_utils has no name {name!r}; at the top it has {', '.join(__all__)}"
        )
    home = importlib.import_module(f"playbook_utils.{_HOMES[name]}")
    return home if name == _HOMES[name] else getattr(home, name)


def __dir__() -> list[str]:
    return __all__


notebooks.install()
