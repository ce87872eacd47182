"""The words for a failure, from what the ranks sent, without any process."""

from __future__ import annotations

import pickle
import socket
import sys
import threading

import pytest
import torch

from playbook_utils.errors import LaunchError, LaunchTimeout
from playbook_utils.workers import mends, report, worker
from playbook_utils.workers.raised import Frame, Raised, describe
from playbook_utils.workers.rank import Rank

LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3"
LATE = "RuntimeError: Timed out waiting 1000ms for recv operation to complete"
OWN = Frame("/home/me/lesson.py", 4, "train", "dist.all_reduce(x)")
LIBRARY = Frame(torch.__file__, 9, "wrapper")
OURS = [Frame(worker.__file__, 5, "run"), Frame(mends.__file__, 9, "readline")]


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
    frames = (OURS[0], LIBRARY, OWN, LIBRARY, OURS[1])
    text = str(report.failure([rank(0, raised=raised("ValueError: x", *frames))], 1))
    assert "me/lesson.py, line 4, in train\n    dist.all_reduce(x)" in text
    assert (
        text.count("torch/__init__.py") == 1
        and "worker.py" not in text
        and "then in wrapper" in text
    )


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
    assert [(cause.how, cause.summary) for cause in sent.causes] == [
        ("caused by", "ValueError: invalid literal for int() with base 10: 'x'")
    ]
    assert isinstance(pickle.loads(sent.pickled), RuntimeError)


def text_of(error: BaseException) -> str:
    """What a launch says of a rank that raised `error`."""
    try:
        raise error
    except BaseException as caught:
        return str(report.failure([rank(0, raised=describe(caught))], 1))


def test_a_line_that_repeats_is_folded() -> None:
    def call_itself() -> None:
        call_itself()

    with pytest.raises(RecursionError) as caught:
        call_itself()
    text = text_of(caught.value)
    assert text.count("in call_itself") == 1 and "the same line" in text and len(text) < 1000


def test_a_long_traceback_is_cut_in_its_middle() -> None:
    def even(n: int) -> None:
        odd(n - 1)

    def odd(n: int) -> None:
        if n < 0:
            raise ValueError("the end")
        even(n - 1)

    with pytest.raises(ValueError) as caught:
        even(200)
    text = text_of(caught.value)
    assert text.count(", in ") == report.MAX_FRAMES
    assert f"{204 - report.MAX_FRAMES} lines of the traceback left out" in text
    assert text.endswith('raise ValueError("the end")\n')


def test_many_causes_are_cut_in_their_middle() -> None:
    error = ValueError("cause 0")
    for i in range(1, 31):
        error, error.__cause__ = ValueError(f"cause {i}"), error
    text = text_of(error)
    assert "cause 30\n" in text and "caused by ValueError: cause 0" in text
    assert text.count("cause ") <= report.MAX_CAUSES + 1 and "21 exceptions left out" in text


def test_a_circle_of_causes_ends() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert text_of(first).count("caused by") == 1


def test_a_long_message_is_cut_and_says_how_much() -> None:
    text = text_of(ValueError("<" + "x" * 5_000_000 + ">"))
    assert len(text) < 6000 and "ValueError: <xxx" in text and "xxx>" in text
    assert "characters left out" in text


def test_many_ranks_with_long_messages_stay_readable() -> None:
    ranks = [rank(i, raised=describe(ValueError(f"{i}" * 4000))) for i in range(64)]
    assert len(str(report.failure(ranks, 1))) < 30_000


def test_an_exception_whose_own_methods_raise_is_told() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise SystemExit

        @property
        def exceptions(self) -> None:
            raise RuntimeError

    assert "<locals>.Broken: <exception str() failed>" in text_of(Broken())


def test_members_of_an_exception_group_are_told() -> None:
    class Group(Exception):  # as Python 3.11's, and the backport for 3.10
        def __init__(self, *members: Exception) -> None:
            super().__init__("two tasks failed")
            self.exceptions = members

    text = text_of(Group(ValueError("bad batch"), Group(KeyError("lr"))))
    assert (
        "member 1 of 2: ValueError: bad batch" in text and "member 1 of 1: KeyError: 'lr'" in text
    )


@pytest.mark.skipif(sys.version_info < (3, 11), reason="ExceptionGroup came with Python 3.11")
def test_an_exception_group_arrives() -> None:
    error = ExceptionGroup("two", [ValueError("a"), KeyError("b")])  # noqa: F821
    assert "member 2 of 2: KeyError: 'b'" in text_of(error)
    assert len(pickle.loads(describe(error).pickled).exceptions) == 2


class Coded(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Padded(Exception):
    def __init__(self, text: str, unit: str = "bytes") -> None:
        super().__init__(f"{text} {unit}")


@pytest.mark.parametrize("error", [Coded(3, "no"), Padded("12")])
def test_an_exception_whose_init_takes_other_arguments_arrives(error: Exception) -> None:
    arrived = pickle.loads(describe(error).pickled)
    assert type(arrived) is type(error) and str(arrived) == str(error)
    assert arrived.args == error.args and vars(arrived) == vars(error)


def test_a_cause_that_is_too_long_to_show_stays_among_the_failures() -> None:
    for text, shown in (("short", True), ("x" * 100_000, False)):
        error = report.failure([rank(0, raised=describe(ValueError(text)))], 1)
        assert str(error.failures[0].exception) == text
        assert (report.cause(error) is not None) == shown


def dump_of(*frames: tuple[str, str]) -> bytes:
    """faulthandler's, innermost first."""
    lines = [f'  File "{file}", line 3 in {function}\n' for file, function in frames]
    return "".join(lines).encode() + b'  File "<string>", line 7 in <module>\n'


def test_a_rank_that_unpickles_still_receives_its_arguments() -> None:
    inner = [(report.pickling.__file__, "loads"), (worker.__file__, "_prepare")]
    outer = [(worker.__file__, "run"), ("<string>", "main")]
    position = report.failure([rank(0, dump=dump_of(*inner, *outer))], 2).positions[0]
    assert position == "still receiving the function and its arguments"
    inner.insert(0, ("/home/me/lesson.py", "__setstate__"))
    position = report.failure([rank(0, dump=dump_of(*inner, *outer))], 2).positions[0]
    assert position.endswith("and its arguments, at me/lesson.py, line 3")


def test_a_library_function_launched_as_it_is_has_a_position() -> None:
    dump = dump_of((torch.__file__, "barrier"), (torch.__file__, "wrapper"), OUTER)
    assert report.failure([rank(0, dump=dump)], 2).positions == {0: "barrier"}


OUTER = (worker.__file__, "run")


@pytest.mark.parametrize(
    ("function", "said"), [("all_reduce", True), ("barrier", False), ("send", False)]
)
def test_one_collective_that_waits_may_be_one_of_different_shapes(
    function: str, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG", raising=False)
    dump = dump_of((torch.__file__, function), ("/home/me/lesson.py", "train"), OUTER)
    ranks = [rank(0, dump=dump), rank(1, result=bytearray())]
    assert ("may differ in shape" in str(report.failure(ranks, 2))) == said
    ranks[1] = rank(1, dump=dump.replace(b"line 3", b"line 4"))
    assert "may differ in shape" not in str(report.failure(ranks, 2))
