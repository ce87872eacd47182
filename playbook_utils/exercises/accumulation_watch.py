"""What the checks of lesson 03 watch with: a model, a gradient scaler, and hooks on gradients.

    model = WatchedModel()
    ...
    model.rows, model.most_waiting          # rows of each forward; activations held at one time

Left out: what is expected of them (`playbook_utils.exercises.gradient_accumulation`).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["ROWS", "SEQ_LEN", "VOCAB", "WatchedModel", "WatchedScaler", "watch_grads"]

VOCAB, ROWS, SEQ_LEN = 11, 7, 5


class WatchedModel(nn.Module):
    """A small model with a frozen layer that remembers how many rows each forward saw.

    `most_waiting`: of how many forward passes the activations were held at one time, for want of
    a backward.
    """

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, 6, dtype=dtype)
        self.frozen = nn.Linear(6, 6, dtype=dtype).requires_grad_(False)
        self.head = nn.Linear(6, VOCAB, dtype=dtype)
        self.rows: list[int] = []
        self.most_waiting = 0
        self._waiting: list[StorageWeakRef] = []

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, T, V)."""
        self.rows.append(len(tokens))
        hidden = torch.tanh(self.frozen(self.embedding(tokens)))
        scores: Tensor = self.head(hidden)
        if scores.requires_grad:
            saved = StorageWeakRef(hidden.untyped_storage())  # type: ignore[no-untyped-call]
            self._watch(saved, scores)
        return scores

    def _watch(self, saved: StorageWeakRef, scores: Tensor) -> None:
        def backward_came(_: Tensor) -> None:
            self._waiting = [other for other in self._waiting if other is not saved]

        scores.register_hook(backward_came)  # type: ignore[no-untyped-call]
        self._waiting = [other for other in self._waiting if not other.expired()] + [saved]  # type: ignore[no-untyped-call]
        self.most_waiting = max(self.most_waiting, len(self._waiting))


class WatchedScaler(torch.amp.GradScaler):
    """A CPU gradient scaler that counts its calls."""

    def __init__(self, init_scale: float) -> None:
        super().__init__("cpu", init_scale=init_scale, growth_interval=1000)
        self.calls: Counter[str] = Counter()

    def scale(self, outputs: Any) -> Any:
        """Counted."""
        self.calls["scale"] += 1
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Counted."""
        self.calls["unscale_"] += 1
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Counted."""
        self.calls["step"] += 1
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Counted."""
        self.calls["update"] += 1
        super().update(new_scale)


def watch_grads(model: nn.Module) -> list[int]:
    """Filled with the number of gradients that exist each time one is ready."""
    counts: list[int] = [0]
    params = [param for param in model.parameters() if param.requires_grad]

    def count(_: Tensor) -> None:
        counts.append(sum(param.grad is not None for param in params))

    for param in params:
        param.register_post_accumulate_grad_hook(count)  # type: ignore[no-untyped-call]
    return counts
