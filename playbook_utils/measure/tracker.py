"""Torch's memory trackers, made to keep a timeline and to run over any number of steps.

`make_tracker` gives a dispatch mode that sees every operator and calls `on_change` after each that
changed what is held. The book-keeping (which storage is alive, and what it is) is torch's
`MemTracker`, or `FSDPMemTracker` for a model under `fully_shard`. What is different here:

- No module statistics, which made torch's tracker refuse a second forward (a second microbatch).
- Temporaries of an optimizer step are "other", not optimizer states.
- A hook that drops `param.grad` once it is there (an optimizer inside backward) is no warning.
- What is made outside forward, such as a buffer to communicate gradients, is "other", not an
  activation.

Left out: the public face of it (`measure.memory`). Importing this module imports DTensor, and using
it torch._dynamo: a second each in a fresh process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from playbook_utils.measure.private import FSDPMemTracker, MemTracker, tree_leaves

__all__ = ["make_tracker"]

# Fields of MemorySample, and the names in torch's _MemRefType and _FSDPRefType that belong there.
_KINDS = {
    "params_bytes": ("PARAM", "SHARDED_PARAM", "UNSHARDED_PARAM"),
    "grads_bytes": ("GRAD", "SHARDED_GRAD", "UNSHARDED_GRAD"),
    "optimizer_states_bytes": ("OPT",),
    "activations_bytes": ("ACT",),
    "other_bytes": ("BUFFER", "TEMP", "OTH", "INP", "ALL_GATHER", "REDUCE_SCATTER"),
}
_FIELDS = {kind: name for name, kinds in _KINDS.items() for kind in kinds}

Held = dict[str, int]
"""Bytes by field of MemorySample."""


class _Timeline:
    """Mixed into torch's trackers."""

    on_change: Callable[[Held, str], None]
    in_forward: bool = True
    """Whether what is made outside backward and optimizer is an activation."""
    device: torch.device
    optimizer: torch.optim.Optimizer | None = None
    masters: Sequence[torch.Tensor] = ()

    def phase(self) -> str:
        """ "backward", "optimizer" or "forward", whatever runs now."""
        if self._in_opt:  # type: ignore[attr-defined]
            return "optimizer"
        return "backward" if self._mod_tracker.is_bw else "forward"  # type: ignore[attr-defined]

    def held(self) -> Held:
        """Bytes held now on the tracked device."""
        held = dict.fromkeys(_KINDS, 0)
        for device, by_kind in self._curr_mem_snap.items():  # type: ignore[attr-defined]
            if device.type == self.device.type:
                for kind, size_bytes in by_kind.items():
                    if kind != "Total":
                        held[_FIELDS[kind.name]] += size_bytes
        return held

    def _track(self, reftype: Any, tensor: torch.Tensor) -> None:
        kinds = self._ref_class  # type: ignore[attr-defined]
        outside = reftype == kinds.ACT and not self.in_forward and not self._in_ac  # type: ignore[attr-defined]
        if reftype == kinds.OPT or outside:
            reftype = kinds.TEMP
        super()._track(reftype, tensor)  # type: ignore[misc]

    def _update_and_maybe_create_winfos(self, t: Any, *args: Any, **kwargs: Any) -> Any:
        if t is None:  # torch's own hook looks at param.grad after the one that dropped it
            return set()
        return super()._update_and_maybe_create_winfos(t, *args, **kwargs)  # type: ignore[misc]

    def _update_peak_stats(self, _: Any) -> None:
        # Torch calls this after each operator. It marks optimizer states when the step is over;
        # marked as they come, they are not taken for temporaries in the first step.
        if self._in_opt and self.optimizer is not None:  # type: ignore[attr-defined]
            for state in islice(reversed(self.optimizer.state.values()), 2):
                for tensor in tree_leaves(state):
                    if isinstance(tensor, torch.Tensor):
                        self._update_and_maybe_create_winfos(tensor, self._ref_class.OPT)  # type: ignore[attr-defined]
            self.mark_masters()
        self.on_change(self.held(), self.phase())

    def mark_masters(self) -> None:
        """Count master copies as optimizer states, and their gradients as gradients."""
        kinds = self._ref_class  # type: ignore[attr-defined]
        for master in self.masters:
            self._update_and_maybe_create_winfos(master, kinds.OPT)
            if master.grad is not None:
                self._update_and_maybe_create_winfos(master.grad, kinds.GRAD)


class _ModelTracker(_Timeline, MemTracker):  # type: ignore[misc]
    """For a plain model, or one under DDP or tensor parallelism."""

    _ac_mod: Any  # torch's own

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        if module not in self.memory_tracking:
            self._track_module_params_and_buffers(module, install_grad_hooks=True)
            self.memory_tracking[module] = True
        if self._mod_tracker.is_bw and self._ac_mod is None:  # a checkpoint's second forward
            self._ac_mod = weakref.ref(module)
            self._in_ac = True

    def _post_fw_hook(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._ac_mod is not None and self._ac_mod() is module:
            self._ac_mod = None
            self._in_ac = False

    def _pre_bw_hook(self, module: nn.Module, args: Any) -> None:
        pass

    _post_bw_hook = _pre_bw_hook


class _ShardedTracker(_Timeline, FSDPMemTracker):  # type: ignore[misc]
    """For a model under `fully_shard`."""

    def _fsdp_state_pre_forward(self, fsdp_mod: Any, original: Any) -> Any:
        inner = super()._fsdp_state_pre_forward(fsdp_mod, original)

        def start(*args: Any, **kwargs: Any) -> Any:
            if fsdp_mod is self._root_mod and not self._mod_tracker.is_bw:
                self.reset_mod_stats()  # a new step or microbatch, which torch's would refuse
            return inner(*args, **kwargs)

        return start


def make_tracker(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
    masters: Sequence[torch.Tensor],
    on_change: Callable[[Held, str], None],
) -> Any:
    """A tracker of `model`, to be entered as a context; `on_change(held, phase)`."""
    tracker: Any
    if isinstance(model, FSDPModule):
        tracker = _ShardedTracker(model, optimizer)
    else:
        tracker = _ModelTracker()
        tracker.track_external(model, optimizer)
    tracker.device, tracker.optimizer = device, optimizer
    tracker.on_change, tracker.masters = on_change, masters
    tracker.mark_masters()
    return tracker
