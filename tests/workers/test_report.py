"""The words for a failure, from what the ranks sent, without any process."""

from __future__ import annotations

import pickle
import socket
import threading
from pathlib import Path

from playbook_utils.errors import LaunchError, LaunchTimeout
from playbook_utils.workers import report
from playbook_utils.workers.rank import Rank
from playbook_utils.workers.worker import Frame, Raised, describe

LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3"
LATE = "RuntimeError: Timed out waiting 1000ms for recv operation to complete"
OWN = Frame("/home/me/lesson.py", 4, "train", "dist.all_reduce(x)")
LIBRARY = Frame(str(Path(report.__file__).with_name("session.py")), 9, "wrapper")


def rank(number: int, **state) -> Rank:
    sock = socket.socket()
    sock.close()
    one = Rank(number, pid=1, task=sock, pipes={}, ready=True)
    for name, value in state.items():
        setattr(one, name, value)
    return one


def raised(summary: str, *frames: Frame) -> Raised:
    return Raised(summary, frames or (OWN,))


def test_a_rank_that_only_lost_a_peer_is_no_cause() -> None:
    ranks = [rank(0, raised=raised(LOST)), rank(1, raised=raised("ValueError: no"))]
    error = report.failure(ranks, 10)
    assert [f.rank for f in error.failures] == [1]
    assert error.positions[0].endswith("where it lost a peer")
    assert "rank 1 of 2 failed\nrank 1: ValueError: no\n" in str(error)


def test_where_all_lost_a_peer_all_are_told() -> None:
    error = report.failure([rank(0, raised=raised(LOST)), rank(1, raised=raised(LOST))], 10)
    assert [f.rank for f in error.failures] == [0, 1] and type(error) is LaunchError
    assert str(error).count("Connection closed by peer") == 1


def test_a_timed_out_collective_is_a_deadlock_of_all() -> None:
    dump = b'  File "/home/me/lesson.py", line 7 in loop\n  File "x", line 1 in main\n'
    ranks = [rank(0, raised=raised(LATE)), rank(1, raised=raised(LOST)), rank(2, dump=dump)]
    error = report.failure(ranks, 10)
    assert isinstance(error, LaunchTimeout) and error.failures == ()
    assert "lost a peer" not in str(error)


def test_an_error_beside_a_deadlock_is_the_cause() -> None:
    ranks = [rank(0, raised=raised(LATE)), rank(1, raised=raised("KeyError: 'x'"))]
    error = report.failure(ranks, 10)
    assert type(error) is LaunchError and [f.rank for f in error.failures] == [1]


def test_a_position_is_the_call_and_the_own_line() -> None:
    dump = (
        f'  File "{threading.__file__}", line 3 in wait\n'.encode()
        + f'  File "{LIBRARY.file}", line 30 in all_reduce\n'.encode()
        + f'  File "{LIBRARY.file}", line 9 in wrapper\n'.encode()
        + b'  File "/home/me/lesson.py", line 4 in train\n'
        + f'  File "{LIBRARY.file}", line 1 in run\n'.encode()
    )
    error = report.failure([rank(0, dump=dump), rank(1, result=bytearray())], 2)
    assert error.positions == {0: "all_reduce (me/lesson.py, line 4)", 1: "had returned"}
    assert str(error).startswith("rank 0 of 2 did not finish within 2 s")


def test_exit_codes_and_signals_in_words() -> None:
    texts = [str(report.failure([rank(0, exit_code=code)], 1)) for code in (3, -9, -11, -6)]
    words = ["exited with code 3", "SIGKILL (out of memory", "SIGSEGV (a crash", "SIGABRT"]
    assert all(word in text for word, text in zip(words, texts, strict=True))


def test_library_frames_are_left_out_but_for_the_last_call() -> None:
    frames = (LIBRARY, OWN, LIBRARY)
    text = str(report.failure([rank(0, raised=raised("ValueError: x", *frames))], 1))
    assert "me/lesson.py, line 4, in train\n    dist.all_reduce(x)" in text
    assert text.count("session.py") == 1 and "then in wrapper" in text


def test_an_exception_is_described_with_its_causes_and_survives_pickle() -> None:
    def fail() -> None:
        try:
            int("x")
        except ValueError as error:
            raise RuntimeError("outer") from error

    try:
        fail()
    except RuntimeError as error:
        sent = pickle.loads(pickle.dumps(describe(error)))
    assert sent.summary == "RuntimeError: outer"
    assert [summary for summary, _ in sent.causes] == [
        "ValueError: invalid literal for int() with base 10: 'x'"
    ]
    assert isinstance(pickle.loads(sent.pickled), RuntimeError)
