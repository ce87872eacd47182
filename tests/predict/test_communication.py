"""wire_bytes against rings that are walked step by step, not against the closed formula."""

from __future__ import annotations

import subprocess
import sys

import pytest

from playbook_utils.predict.communication import OPS, wire_bytes

WORLD_SIZES = (2, 3, 4, 5, 7, 8, 64)


def ring_pass_bytes(chunks: list[int], rank: int) -> int:
    """Bytes rank sends in one pass of a ring: in step s it passes on chunk (rank - s) mod N."""
    n = len(chunks)
    return sum(chunks[(rank - step) % n] for step in range(n - 1))


@pytest.mark.parametrize("n", WORLD_SIZES)
@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_ring_collectives_send_what_a_walked_ring_sends(n: int, chunk: int) -> None:
    chunks = [chunk] * n
    for rank in range(n):
        one_pass = ring_pass_bytes(chunks, rank)
        assert wire_bytes("reduce_scatter", sum(chunks), n) == one_pass
        assert wire_bytes("all_gather", sum(chunks), n) == one_pass
        assert wire_bytes("all_reduce", sum(chunks), n) == 2 * one_pass


@pytest.mark.parametrize("n", WORLD_SIZES)
def test_all_to_all_keeps_only_its_own_chunk(n: int) -> None:
    sent = sum(10 for peer in range(n) if peer != 0)
    assert wire_bytes("all_to_all", 10 * n, n) == sent


@pytest.mark.parametrize("op", ["broadcast", "reduce", "gather", "scatter", "send"])
def test_rooted_ops_and_send_count_every_byte_once(op: str) -> None:
    assert [wire_bytes(op, 1001, n) for n in (2, 3, 8)] == [1001] * 3


@pytest.mark.parametrize("op", ["recv", "barrier"])
def test_recv_and_barrier_send_nothing(op: str) -> None:
    assert wire_bytes(op, 1001, 4) == 0


@pytest.mark.parametrize("op", OPS)
def test_one_rank_and_empty_messages_send_nothing(op: str) -> None:
    assert wire_bytes(op, 1001, 1) == 0
    assert wire_bytes(op, 0, 4) == 0


def test_rounds_up_and_stays_exact_beyond_float_precision() -> None:
    assert wire_bytes("all_reduce", 10, 3) == 14  # 13.33
    assert wire_bytes("all_gather", 1, 2) == 1
    assert wire_bytes("all_gather", 2**60 + 2, 2) == 2**59 + 1
    assert wire_bytes("all_reduce", 4e9, 8) == 7_000_000_000
    assert isinstance(wire_bytes("all_reduce", 4e9, 8), int)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("allreduce", 8, 2), ValueError, "unknown op 'allreduce'.*all_gather, all_reduce"),
        (("all_reduce", -1, 2), ValueError, "payload_bytes is -1: expected at least 0"),
        (("all_reduce", 1.5, 2), ValueError, "payload_bytes is 1.5: expected a whole number"),
        (("all_reduce", float("inf"), 2), ValueError, "payload_bytes is inf"),
        (("all_reduce", float("nan"), 2), ValueError, "payload_bytes is nan"),
        (("all_reduce", 8, 0), ValueError, "world_size is 0: expected at least 1"),
        (("all_reduce", "8", 2), TypeError, r"payload_bytes is '8' \(str\)"),
        (("all_reduce", 8, True), TypeError, r"world_size is True \(bool\)"),
    ],
)
def test_bad_arguments_say_what_was_found(
    arguments: tuple[object, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        wire_bytes(*arguments)  # type: ignore[arg-type]


def test_importing_predict_never_imports_torch() -> None:
    code = (
        "import sys; import playbook_utils.predict.communication; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
