"""Batches to train on: a generated language of known entropy, and real text.

`GeneratedLanguage` is the same on every machine and says how low a loss can go.
`StandardLibraryText` is real: the source of Python's own standard library, as bytes; it differs
between Python versions, so no stored output may depend on it. Both give any batch by its step
alone, without the ones before, and batches of 2n sequences hold what two batches of n hold.

Left out: tokenizers, downloads, shuffling by epochs, loading in the background.

    language = GeneratedLanguage()
    tokens, targets = language.batch(step=0, batch_size=8, seq_len=64)         # (B, T) int64 each
    tokens, targets = shard_batch((tokens, targets), rank=1, world_size=4)     # this rank's rows
    for tokens, targets in microbatches((tokens, targets), num_microbatches=2): ...

Randomness is SHAKE-128 (FIPS 202) of a key that names seed and sequence, read as integers. A
standard fixes its output for good, where NumPy and PyTorch may change how a seed becomes numbers
(NumPy's NEP 19 keeps that right), and random access costs nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import operator
import os
import sysconfig
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["Batch", "GeneratedLanguage", "StandardLibraryText", "microbatches", "shard_batch"]

Batch = tuple[Tensor, Tensor]
"""tokens (B, T) and targets (B, T), int64; targets are the tokens one place further."""

_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
)


class GeneratedLanguage:
    """A Markov chain over `vocab_size` tokens whose entropy rate is known exactly.

    The tokens lie on a hidden, shuffled ring. After a token comes the one 1, 2, ... places further
    along, with probabilities `weights / sum(weights)`. As these are the same after every token,
    the entropy of the next token given the past is that of the weights: no model has a lower
    expected loss, at any position of a sequence. (One batch may lie below it by chance, by about
    1 / sqrt(tokens).)

    Raises:
        ValueError: sizes below 1, more weights than tokens, or weights that are not positive
            integers with a power of two as their sum (which keeps the probabilities exact).
    """

    def __init__(
        self, vocab_size: int = 64, seed: int = 0, weights: tuple[int, ...] = (8, 4, 2, 2)
    ) -> None:
        _require_at_least_one(vocab_size=vocab_size)
        total = sum(weights)
        if min(weights, default=0) < 1 or total.bit_count() != 1 or len(weights) > vocab_size:
            raise ValueError(
                f"weights={weights} with sum {total} and vocab_size={vocab_size}; expected "
                "positive integers, at most one per token, with a power of two as their sum: "
                "(8, 4, 2, 2)"
            )
        self.vocab_size, self.seed, self.weights = vocab_size, seed, tuple(weights)

    @property
    def entropy(self) -> float:
        """Entropy rate in nats per token, the floor of the loss: 1.2130 for the default."""
        total = sum(self.weights)
        return -math.fsum(w / total * math.log(w / total) for w in self.weights)

    @cached_property
    def successors(self) -> npt.NDArray[np.int64]:
        """(V, number of weights): the tokens that can follow each token, likeliest as weighted."""
        ring = np.arange(self.vocab_size)
        draws = _random_integers(f"{self.seed}/ring", self.vocab_size)
        for last in range(self.vocab_size - 1, 0, -1):  # Fisher-Yates shuffle
            other = int(draws[last]) % (last + 1)
            ring[[last, other]] = ring[[other, last]]
        table = np.empty((self.vocab_size, len(self.weights)), dtype=np.int64)
        for places in range(len(self.weights)):
            table[ring, places] = np.roll(ring, -1 - places)
        return table

    def batch(self, step: int, batch_size: int, seq_len: int) -> Batch:
        """Sequences `step * batch_size` to `(step + 1) * batch_size - 1`, cut to `seq_len`."""
        first = _first_sequence(step, batch_size, seq_len)
        keys = [f"{self.seed}/{sequence}" for sequence in range(first, first + batch_size)]
        draws = np.stack([_random_integers(key, seq_len + 1) for key in keys])  # (B, T+1)
        choice_of = np.repeat(np.arange(len(self.weights)), self.weights)
        choices = choice_of[draws % len(choice_of)]  # (B, T+1)
        tokens = np.empty((batch_size, seq_len + 1), dtype=np.int64)
        tokens[:, 0] = draws[:, 0] % self.vocab_size
        for t in range(seq_len):
            tokens[:, t + 1] = self.successors[tokens[:, t], choices[:, t + 1]]
        return _tokens_and_targets(tokens)


class StandardLibraryText:
    """The standard library's source, one token per byte (vocab_size 256).

    Files in the order of their relative paths, tests left out, up to `max_bytes`; every tenth is
    for validation. Read on first use, then kept. `folder` is the running interpreter's own library
    unless given.
    """

    vocab_size = 256

    def __init__(self, max_bytes: int = 4_000_000, folder: str | Path | None = None) -> None:
        _require_at_least_one(max_bytes=max_bytes)
        self.max_bytes = max_bytes
        self.folder = Path(sysconfig.get_path("stdlib") if folder is None else folder)

    @cached_property
    def _splits(self) -> dict[str, npt.NDArray[np.uint8]]:
        texts: list[bytes] = []
        left = self.max_bytes
        for path in _source_files(self.folder):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                text = path.read_text(encoding="utf-8").encode()[:left]  # Unix line ends
                texts += [text] if text else []
                left -= len(text)
            if left == 0:
                break
        validation = texts[9::10]
        if not validation:
            raise FileNotFoundError(
                f"found {len(texts)} readable .py files of the standard library in {self.folder}, "
                "expected at least 10: this Python keeps its library in a zip file, or was "
                "installed without sources; use a python.org, conda or distribution Python, or "
                "pass folder=, or train on GeneratedLanguage()"
            )
        del texts[9::10]
        named = {"train": texts, "validation": validation}
        return {name: np.frombuffer(b"".join(part), np.uint8) for name, part in named.items()}

    def num_tokens(self, split: str = "train") -> int:
        """Number of bytes in "train" or "validation"."""
        return len(self._text(split))

    def batch(self, step: int, batch_size: int, seq_len: int, split: str = "train") -> Batch:
        """`batch_size` windows at random places of the split, the same ones for the same step.

        ValueError for an unknown split and a sequence longer than the text; FileNotFoundError
        where the library's source is not there.
        """
        first = _first_sequence(step, batch_size, seq_len)
        text = self._text(split)
        num_starts = len(text) - seq_len
        if num_starts < 1:
            raise ValueError(
                f"seq_len={seq_len} needs {seq_len + 1} bytes, but the {split} split has "
                f"{len(text)}; use a shorter sequence or a larger max_bytes={self.max_bytes}"
            )
        windows = []
        for sequence in range(first, first + batch_size):
            start = int(_random_integers(f"{split}/{sequence}", 1)[0]) % num_starts
            windows.append(text[start : start + seq_len + 1])
        return _tokens_and_targets(np.stack(windows).astype(np.int64))

    def encode(self, text: str) -> Tensor:
        """Text to tokens: (number of bytes,) int64."""
        return torch.tensor(list(text.encode()), dtype=torch.int64)

    def decode(self, tokens: Tensor) -> str:
        """Tokens (T,) back to text; a byte that is no UTF-8 becomes a replacement character."""
        return bytes(tokens.tolist()).decode("utf-8", errors="replace")

    def _text(self, split: str) -> npt.NDArray[np.uint8]:
        if split not in ("train", "validation"):
            raise ValueError(f'split is {split!r}; use "train" or "validation"')
        return self._splits[split]


def shard_batch(batch: Batch, rank: int, world_size: int, uneven: str = "refuse") -> Batch:
    """The rows of `batch` that belong to `rank`: a contiguous slice; all slices make the whole.

    With `uneven="allow"` the first B % world_size ranks get one row more (and some get none where
    B < world_size). The mean of the ranks' mean losses is then not the batch's: weight by tokens.
    ValueError where B does not divide by world_size and `uneven` is "refuse", or for no such rank.
    """
    _require_at_least_one(world_size=world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}; expected 0 to {world_size - 1} (world_size - 1)")
    if uneven not in ("refuse", "allow"):
        raise ValueError(f'uneven is {uneven!r}; use "refuse" or "allow"')
    num_rows = len(batch[0])
    rows_each, rows_left = divmod(num_rows, world_size)
    if rows_left and uneven == "refuse":
        larger = (rows_each + 1) * world_size
        sizes = f"{rows_each * world_size} or {larger}" if rows_each else f"{larger}"
        raise ValueError(
            f"a batch of {num_rows} rows does not divide over {world_size} ranks; use {sizes} "
            'rows, or pass uneven="allow" and weight each rank\'s loss by its number of tokens'
        )
    start = rank * rows_each + min(rank, rows_left)
    stop = start + rows_each + (rank < rows_left)
    return batch[0][start:stop], batch[1][start:stop]


def microbatches(batch: Batch, num_microbatches: int) -> list[Batch]:
    """Cut a batch into `num_microbatches` of equal size, in order; ValueError where that leaves
    rows over."""
    _require_at_least_one(num_microbatches=num_microbatches)
    num_rows = len(batch[0])
    if num_rows % num_microbatches:
        raise ValueError(
            f"a batch of {num_rows} rows does not divide into {num_microbatches} microbatches of "
            "equal size; their mean gradient would not be the batch's"
        )
    tokens, targets = (part.chunk(num_microbatches) for part in batch)
    return list(zip(tokens, targets, strict=True))


def _random_integers(key: str, count: int) -> npt.NDArray[np.uint32]:
    """`count` integers below 2^32 that depend on `key` alone; a longer draw begins the same."""
    stream = hashlib.shake_128(key.encode()).digest(4 * count)
    return np.frombuffer(stream, dtype="<u4")


def _tokens_and_targets(windows: npt.NDArray[np.int64]) -> Batch:
    """Windows (B, T+1) to tokens (B, T) and targets (B, T)."""
    both = torch.from_numpy(windows)
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def _first_sequence(step: int, batch_size: int, seq_len: int) -> int:
    _require_at_least_one(batch_size=batch_size, seq_len=seq_len)
    if operator.index(step) < 0:
        raise ValueError(f"step is {step}; steps count from 0")
    return step * batch_size


def _source_files(folder: Path) -> list[Path]:
    """All .py files under `folder` but tests and installed packages, by relative path."""
    found: list[Path] = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        found += [Path(parent, name) for name in files if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _require_at_least_one(**sizes: int) -> None:
    for name, value in sizes.items():
        if operator.index(value) < 1:
            raise ValueError(f"{name} is {value}; use a whole number of at least 1")
