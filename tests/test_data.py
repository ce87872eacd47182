"""Batches: stored fingerprints, entropy against independent computations, slices that add up."""

from __future__ import annotations

import hashlib
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from playbook_utils.data import (
    Batch,
    GeneratedLanguage,
    StandardLibraryText,
    microbatches,
    shard_batch,
)


def fingerprint(batch: Batch) -> str:
    as_bytes = b"".join(part.numpy().astype("<i8").tobytes() for part in batch)
    return hashlib.sha256(as_bytes).hexdigest()[:16]


def transition_matrix(language: GeneratedLanguage) -> np.ndarray:
    matrix = np.zeros((language.vocab_size, language.vocab_size))
    for token, row in enumerate(language.successors):
        for successor, weight in zip(row, language.weights, strict=True):
            matrix[token, successor] += weight / sum(language.weights)
    return matrix


def entropy_rate(matrix: np.ndarray) -> float:
    """-sum_i pi_i sum_j P_ij ln P_ij, with pi from the linear system pi P = pi, sum(pi) = 1."""
    size = len(matrix)
    system = np.vstack([matrix.T - np.eye(size), np.ones(size)])
    stationary = np.linalg.lstsq(system, np.append(np.zeros(size), 1.0), rcond=None)[0]
    logs = np.log(np.where(matrix > 0, matrix, 1.0))
    return float(-(stationary[:, None] * matrix * logs).sum())


class TestGeneratedLanguage:
    def test_batches_never_change(self) -> None:
        """Stored lesson outputs depend on these; if this fails, all of them are out of date."""
        assert fingerprint(GeneratedLanguage().batch(0, 4, 16)) == "271dd1d4e21342f4"
        other = GeneratedLanguage(vocab_size=7, seed=3, weights=(1, 1))
        assert fingerprint(other.batch(5, 3, 9)) == "c60a0551d00d983e"

    def test_shapes_and_targets(self) -> None:
        tokens, targets = GeneratedLanguage(vocab_size=11).batch(2, batch_size=3, seq_len=5)
        assert tokens.shape == targets.shape == (3, 5)
        assert tokens.dtype == targets.dtype == torch.int64
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        assert tokens.min() >= 0 and tokens.max() < 11

    def test_random_access(self) -> None:
        language = GeneratedLanguage()
        first = language.batch(9, 4, 8)
        for step in range(3):
            language.batch(step, 2, 33)
        again = language.batch(9, 4, 8)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        copy = pickle.loads(pickle.dumps(language)).batch(9, 4, 8)
        assert all(torch.equal(a, b) for a, b in zip(first, copy, strict=True))

    def test_a_large_batch_holds_what_small_ones_hold(self) -> None:
        language = GeneratedLanguage()
        large = language.batch(1, 6, 8)
        small = [language.batch(step, 2, 8) for step in (3, 4, 5)]
        for i in range(2):
            assert torch.equal(large[i], torch.cat([batch[i] for batch in small]))
        assert torch.equal(language.batch(1, 6, 5)[0], large[0][:, :5])

    def test_seeds_and_steps_differ(self) -> None:
        batches = [GeneratedLanguage(seed=seed).batch(step, 4, 16) for seed, step in
                   ((0, 0), (0, 1), (1, 0))]  # fmt: skip
        assert len({fingerprint(batch) for batch in batches}) == 3

    @pytest.mark.parametrize("vocab_size", [4, 5, 64, 97])
    @pytest.mark.parametrize("weights", [(1,), (8, 4, 2, 2), (1, 1), (3, 5)])
    def test_entropy_equals_the_linear_solve(
        self, vocab_size: int, weights: tuple[int, ...]
    ) -> None:
        language = GeneratedLanguage(vocab_size, seed=4, weights=weights)
        matrix = transition_matrix(language)
        assert np.allclose(matrix.sum(axis=0), 1) and np.allclose(matrix.sum(axis=1), 1)
        assert language.entropy == pytest.approx(entropy_rate(matrix), abs=1e-12)

    def test_entropy_in_closed_form(self) -> None:
        assert GeneratedLanguage().entropy == pytest.approx(1.75 * math.log(2), abs=1e-15)
        assert GeneratedLanguage(weights=(1, 1)).entropy == pytest.approx(math.log(2), abs=1e-15)
        assert GeneratedLanguage(weights=(4,)).entropy == 0.0

    def test_empirical_entropy(self) -> None:
        """The plug-in estimate from pair counts; its bias is about V * (4 - 1) / (2 n)."""
        language = GeneratedLanguage(vocab_size=16)
        tokens, targets = language.batch(0, 512, 512)
        counts = np.zeros((16, 16))
        np.add.at(counts, (tokens.numpy().ravel(), targets.numpy().ravel()), 1)
        conditional = counts / counts.sum(axis=1, keepdims=True)
        logs = np.log(np.where(conditional > 0, conditional, 1.0))
        empirical = -(counts * logs).sum() / counts.sum()
        assert empirical == pytest.approx(language.entropy, abs=0.005)
        assert np.allclose(conditional, transition_matrix(language), atol=0.02)

    def test_every_token_and_position_is_alike(self) -> None:
        tokens, _ = GeneratedLanguage(vocab_size=8).batch(0, 4000, 6)
        for position in (0, 5):
            shares = torch.bincount(tokens[:, position], minlength=8) / 4000
            assert (shares - 1 / 8).abs().max() < 0.03  # six standard deviations

    @pytest.mark.parametrize("weights", [(), (3,), (8, 4, 2, 1), (0, 4), (-1, 2, 3), (1,) * 64])
    def test_bad_weights_are_refused(self, weights: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match="power of two"):
            GeneratedLanguage(vocab_size=32, weights=weights)

    def test_bad_sizes_are_refused(self) -> None:
        language = GeneratedLanguage()
        for sizes in ((0, 0, 4), (0, 4, 0)):
            with pytest.raises(ValueError, match="is 0; use a whole number of at least 1"):
                language.batch(*sizes)
        with pytest.raises(ValueError, match="step is -1"):
            language.batch(-1, 4, 4)
        with pytest.raises(TypeError):
            language.batch(0, 2.5, 4)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def library() -> StandardLibraryText:
    return StandardLibraryText(max_bytes=400_000)


class TestStandardLibraryText:
    def test_is_real_source(self, library: StandardLibraryText) -> None:
        assert library.num_tokens("train") + library.num_tokens("validation") == 400_000
        tokens, _ = library.batch(0, 64, 256)
        text = "".join(library.decode(row) for row in tokens)
        assert all(word in text for word in ("self", "def ", "return", "\n    "))

    def test_shapes_and_targets(self, library: StandardLibraryText) -> None:
        tokens, targets = library.batch(3, 5, 7)
        assert tokens.shape == targets.shape == (5, 7)
        assert tokens.dtype == targets.dtype == torch.int64
        assert torch.equal(tokens[:, 1:], targets[:, :-1])

    def test_random_access(self, library: StandardLibraryText) -> None:
        again = StandardLibraryText(max_bytes=400_000)
        assert fingerprint(again.batch(7, 4, 32)) == fingerprint(library.batch(7, 4, 32))
        assert fingerprint(library.batch(7, 4, 32)) != fingerprint(library.batch(8, 4, 32))
        halves = [library.batch(step, 2, 32)[0] for step in (14, 15)]
        assert torch.equal(library.batch(7, 4, 32)[0], torch.cat(halves))

    def test_decode_and_encode(self, library: StandardLibraryText) -> None:
        assert library.decode(library.encode("naïve → 1\n")) == "naïve → 1\n"
        assert library.decode(torch.tensor([255, 65])) == "\ufffdA"

    def test_reading_order_splits_and_skipped_files(self, tmp_path: Path) -> None:
        for number in range(20):
            (tmp_path / f"m{number:02}.py").write_bytes(f"{number:02}\r\n".encode())
        for folder in ("test", "site-packages", "package/tests"):
            (tmp_path / folder).mkdir(parents=True)
            (tmp_path / folder / "a.py").write_text("skipped")
        (tmp_path / "a_latin1.py").write_bytes(b"\xe9" * 100)
        (tmp_path / "package" / "a.py").write_text("zz\n")
        text = StandardLibraryText(folder=tmp_path)
        numbers = [f"{n:02}\n" for n in range(20)] + ["zz\n"]
        del numbers[9], numbers[18]
        tokens, targets = text.batch(0, 1, text.num_tokens() - 1)
        assert text.decode(torch.cat([tokens[0], targets[0, -1:]])) == "".join(numbers)
        assert text.num_tokens("validation") == 6
        assert StandardLibraryText(max_bytes=31, folder=tmp_path).num_tokens() == 28

    def test_no_source(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"found 0 readable \.py files.*zip file"):
            StandardLibraryText(folder=tmp_path / "python311.zip").batch(0, 1, 1)

    def test_bad_arguments_are_refused(self, library: StandardLibraryText) -> None:
        with pytest.raises(ValueError, match="split is 'valid'"):
            library.batch(0, 1, 1, split="valid")
        with pytest.raises(ValueError, match="larger max_bytes"):
            library.batch(0, 1, 400_000)
        with pytest.raises(ValueError, match="max_bytes is 0"):
            StandardLibraryText(max_bytes=0)


def numbered(rows: int) -> Batch:
    tokens = torch.arange(rows * 3).reshape(rows, 3)
    return tokens, tokens + 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [0, 1, 5, 6, 14, 21])
def test_slices_make_the_whole(rows: int, world_size: int) -> None:
    batch = numbered(rows)
    slices = [shard_batch(batch, rank, world_size, uneven="allow") for rank in range(world_size)]
    for i in range(2):
        assert torch.equal(torch.cat([part[i] for part in slices]), batch[i])
    sizes = [len(tokens) for tokens, _ in slices]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    if rows % world_size == 0:
        assert torch.equal(shard_batch(batch, 0, world_size)[0], slices[0][0])


@pytest.mark.parametrize(
    ("rows", "world_size", "sizes"), [(5, 2, "use 4 or 6 rows"), (3, 4, "use 4 rows")]
)
def test_an_uneven_batch_is_refused(rows: int, world_size: int, sizes: str) -> None:
    with pytest.raises(ValueError) as caught:
        shard_batch(numbered(rows), 0, world_size)
    assert f"a batch of {rows} rows does not divide over {world_size} ranks" in str(caught.value)
    assert sizes in str(caught.value) and 'uneven="allow"' in str(caught.value)


def test_bad_ranks_are_refused() -> None:
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank is {rank}; expected 0 to 1"):
            shard_batch(numbered(4), rank, 2)
    with pytest.raises(ValueError, match="world_size is 0"):
        shard_batch(numbered(4), 0, 0)
    with pytest.raises(ValueError, match='use "refuse" or "allow"'):
        shard_batch(numbered(4), 0, 2, uneven="pad")


def test_microbatches() -> None:
    batch = numbered(6)
    parts = microbatches(batch, 3)
    assert [len(tokens) for tokens, _ in parts] == [2, 2, 2]
    assert torch.equal(torch.cat([targets for _, targets in parts]), batch[1])
    with pytest.raises(ValueError, match="6 rows does not divide into 4"):
        microbatches(batch, 4)
    with pytest.raises(ValueError, match="num_microbatches is 0"):
        microbatches(batch, 0)
