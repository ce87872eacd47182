"""Labels, order, floods and progress bars, without any process."""

from __future__ import annotations

import pytest

from playbook_utils.workers import output
from playbook_utils.workers.output import RankedOutput


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_rank_0_is_live_and_the_others_wait_their_turn(capsys: pytest.CaptureFixture[str]) -> None:
    shown = RankedOutput(3)
    shown.feed(2, "stdout", b"two\n")
    shown.feed(1, "stdout", b"one\n")
    assert lines(capsys) == []
    shown.feed(0, "stdout", b"zero\n")
    assert lines(capsys) == ["[rank 0] zero"]
    shown.finish(2)
    assert lines(capsys) == []
    shown.finish(0)
    assert lines(capsys) == ["[rank 1] one"]
    shown.feed(1, "stdout", b"one more\n")
    assert lines(capsys) == ["[rank 1] one more"]
    shown.finish(1)
    assert lines(capsys) == ["[rank 2] two"]


def test_arrival_order_shows_each_line_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    shown = RankedOutput(2, "arrival")
    shown.feed(1, "stdout", b"b\n")
    shown.feed(0, "stdout", b"a\n")
    assert lines(capsys) == ["[rank 1] b", "[rank 0] a"]


def test_a_line_in_pieces_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    shown = RankedOutput(1)
    for piece in (b"gr", b"\xc3", b"\xbc", b"n\nlast"):
        shown.feed(0, "stdout", piece)
    shown.close()
    assert lines(capsys) == ["[rank 0] grün", "[rank 0] last"]


def test_bytes_that_are_no_text_do_not_stop_it(capsys: pytest.CaptureFixture[str]) -> None:
    shown = RankedOutput(1)
    shown.feed(0, "stdout", b"\xff\xfe\n")
    shown.close()
    assert lines(capsys) == ["[rank 0] \ufffd\ufffd"]


def test_streams_stay_apart(capsys: pytest.CaptureFixture[str]) -> None:
    shown = RankedOutput(1)
    shown.feed(0, "stdout", b"out\n")
    shown.feed(0, "stderr", b"err\n")
    shown.close()
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("[rank 0] out\n", "[rank 0] err\n")


def test_a_carriage_return_leaves_the_last_state(capsys: pytest.CaptureFixture[str]) -> None:
    shown = RankedOutput(1)
    shown.feed(0, "stdout", b"\r10%\r50%\r100%\r\nnext\r\n")
    shown.close()
    assert lines(capsys) == ["[rank 0] 100%", "[rank 0] next"]


def test_glos_chatter_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    shown = RankedOutput(1)
    shown.feed(0, "stdout", b"[Gloo] Rank 0 is connected to 3 peer ranks. Expected\n[Gloo] else\n")
    shown.close()
    assert lines(capsys) == ["[rank 0] [Gloo] else"]


def test_of_a_flood_beginning_and_end_are_shown_and_the_rest_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = RankedOutput(1)
    each, number = 1000, 1000
    for i in range(number):
        shown.feed(0, "stdout", f"{i:03d}".encode() + b"x" * (each - 4) + b"\n")
    shown.close()
    found = lines(capsys)
    head, note, tail = found[: -1 - output.TAIL_LINES], found[-1 - output.TAIL_LINES], found[-10:]
    assert [line[9:12] for line in tail] == [str(i) for i in range(990, 1000)]
    assert len(head) * each == output.HEAD_BYTES
    assert (
        note
        == f"[rank 0] ... {each * (number - len(head) - output.TAIL_LINES):,} bytes left out ..."
    )


def test_a_flood_just_over_the_limit_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    shown = RankedOutput(1)
    for i in range(105):
        shown.feed(0, "stdout", f"{i:03d}".encode() + b"x" * 996 + b"\n")
    shown.close()
    assert [line[9:12] for line in lines(capsys)] == [f"{i:03d}" for i in range(105)]


def test_a_line_without_end_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    shown = RankedOutput(1)
    for _ in range(100):
        shown.feed(0, "stdout", b"y" * 10_000)
    shown.close()
    assert sum(map(len, lines(capsys))) < 2 * output.HEAD_BYTES
