"""What the checks of lesson 03 watch with, and what they compare with.

    model = WatchedModel()
    ...
    model.rows, model.most_waiting          # rows of each forward; activations held at one time
    PartGradients(parts).likely()           # {what a likely wrong answer did: its gradient}

A gradient that is wrong in a likely way is told by its value, so that the hint names what was done.
Left out: what is expected (`playbook_utils.exercises.gradient_accumulation`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from playbook_utils.data import Batch
from playbook_utils.model import cross_entropy

__all__ = [
    "ROWS", "SEQ_LEN", "VOCAB", "PartGradients", "WatchedModel", "WatchedScaler", "cut",
    "flat_grads", "padded_batch", "told", "watch_grads",
]  # fmt: skip

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
        logits: Tensor = self.head(hidden)
        if logits.requires_grad:
            saved = StorageWeakRef(hidden.untyped_storage())  # type: ignore[no-untyped-call]
            self._watch(saved, logits)
        return logits

    def _watch(self, saved: StorageWeakRef, logits: Tensor) -> None:
        def backward_came(_: Tensor) -> None:
            self._waiting = [other for other in self._waiting if other is not saved]

        logits.register_hook(backward_came)  # type: ignore[no-untyped-call]
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


def padded_batch(lengths: Iterable[int]) -> Batch:
    """Rows of these lengths; what follows is padding."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (ROWS, SEQ_LEN), generator=generator)
    targets = torch.randint(VOCAB, (ROWS, SEQ_LEN), generator=generator)
    hidden = torch.arange(SEQ_LEN) >= torch.tensor(list(lengths))[:, None]
    return tokens, targets.masked_fill(hidden, -100)


def cut(batch: Batch, rows: int) -> list[Batch]:
    """Parts of `rows` rows; the last one may be smaller."""
    starts = range(0, len(batch[0]), rows)
    return [(batch[0][i : i + rows], batch[1][i : i + rows]) for i in starts]


def flat_grads(model: nn.Module) -> Tensor:
    """All gradients of trainable parameters in one vector; zeros where there is none."""
    params = [param for param in model.parameters() if param.requires_grad]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    return torch.cat([grad.flatten() for grad in grads])


class PartGradients:
    """Gradients of each part's summed loss, from which right and likely wrong ones are made."""

    def __init__(self, parts: list[Batch]) -> None:
        model = WatchedModel()
        self.counts = [int((targets != -100).sum()) for _, targets in parts]
        self.rows = [len(tokens) for tokens, _ in parts]
        self.num_positions = sum(targets.numel() for _, targets in parts)
        self.sums = []
        for tokens, targets in parts:
            model.zero_grad()
            cross_entropy(model(tokens), targets, reduction="sum").backward()  # type: ignore[no-untyped-call]
            self.sums.append(flat_grads(model))

    def likely(self) -> dict[str, Tensor]:
        """{hint: the gradient that somebody has who did it}; no part may be without a token."""
        num_parts, num_tokens, whole = len(self.sums), sum(self.counts), sum(self.sums)
        means = [part / count for part, count in zip(self.sums, self.counts, strict=True)]
        by_rows = sum(m * n for m, n in zip(means, self.rows, strict=True)) / sum(self.rows)
        running, seen = torch.zeros_like(means[0]), 0
        for part, count in zip(self.sums, self.counts, strict=True):
            seen += count
            running = (running + part) / seen
        found: Mapping[str, Tensor | float] = {
            'means were added up and divided by T: take sums, reduction="sum"': sum(means)
            / num_tokens,
            "divided twice, in the loss and after it": whole / num_tokens / num_parts,
            f"these are means of {num_parts} parts, added up: nothing divides by {num_parts}": sum(
                means
            ),
            "this is the mean of the parts' means: a token of a short part counts too much": sum(
                means
            )
            / num_parts,
            "each mean was weighted by its rows: weigh it by its tokens, without padding": by_rows,
            f"this is a sum over tokens: divide by T = {num_tokens}": whole,
            f"divided by {self.num_positions}, all positions: padding (-100) is no token": whole
            / self.num_positions,
            f"sums over tokens were divided by the number of parts, expected T = {num_tokens}": (
                whole / num_parts
            ),
            "only the last part is left: gradients were cleared within the loop": self.sums[-1]
            / num_tokens,
            "only the last part's mean is left: gradients were cleared within the loop": means[-1],
            "the last part's mean over the parts: gradients were cleared within the loop": means[-1]
            / num_parts,
            "divided after each part: divide once, after the last": running,
        }
        return {hint: torch.as_tensor(gradient) for hint, gradient in found.items()}


def told(
    found: Tensor | float, likely: Mapping[str, Any], otherwise: str, rtol: float = 1e-6
) -> str:
    """The hint of the likely wrong value that `found` is, or `otherwise`."""
    value = torch.as_tensor(found, dtype=torch.float64)
    for hint, wrong in likely.items():
        other = torch.as_tensor(wrong, dtype=torch.float64)
        if other.shape == value.shape and bool((value - other).norm() <= rtol * other.norm()):
            return hint
    return otherwise
