"""Exercises three ways: stub, solution, planted bugs; alone, on ranks and inside IPython."""

from __future__ import annotations

from typing import Any

import nbformat
import pytest
import torch
import torch.distributed as dist
from nbclient import NotebookClient
from torch import Tensor

from playbook_utils.checks import Exercise, check, expect_calls, expect_close, expect_equal
from playbook_utils.errors import CheckFailed, LaunchError, RankFailure
from playbook_utils.events import CollectiveEvent
from playbook_utils.measure.communication import CommunicationLog
from playbook_utils.workers import launch


def verify_double(attempt: Any) -> None:
    expect_equal(attempt(3), 6, "double(3)", hint="add it to itself")


DOUBLE = Exercise("double", "return twice the number", verify_double, ("think of 2x",))


def verdict(exercise: Exercise, attempt: Any, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The printed lines; the returned text must be what was printed."""
    result = check(exercise, attempt)
    printed = capsys.readouterr().out
    assert printed == result.text + "\n"
    assert result.passed == (result.status == "passed")
    return [result.status, *result.text.splitlines()]


def test_solution_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict(DOUBLE, lambda x: 2 * x, capsys) == ["passed", "passed: double"]


def test_stub_is_not_solved_yet(capsys: pytest.CaptureFixture[str]) -> None:
    def stub(x: int) -> int:
        raise NotImplementedError("return it twice")

    def bare(x: int) -> int:
        raise NotImplementedError

    expected = ["not solved yet", "not solved yet: return it twice"]
    assert verdict(DOUBLE, stub, capsys) == expected
    assert verdict(DOUBLE, bare, capsys)[1] == "not solved yet: return twice the number"


def test_wrong_answer_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict(DOUBLE, lambda x: x * x, capsys) == [
        "failed",
        "failed: double",
        "  double(3): found 9, expected 6",
        "  hint: add it to itself",
    ]


def test_the_exercises_hints_stand_in(capsys: pytest.CaptureFixture[str]) -> None:
    def verify(attempt: Any) -> None:
        expect_equal(attempt(3), 6, "double(3)")

    exercise = Exercise("double", "twice", verify, ("one", "two"))
    assert verdict(exercise, lambda x: x, capsys)[-2:] == ["  hint: one", "  hint: two"]


def test_error_in_the_attempt_shows_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(x: int) -> int:
        return x + "2"  # type: ignore[operator]

    lines = verdict(DOUBLE, broken, capsys)
    assert lines[0] == "failed"
    assert lines[2] == "  TypeError: unsupported operand type(s) for +: 'int' and 'str'"
    number = broken.__code__.co_firstlineno + 1
    assert lines[3].startswith(f'  in broken, line {number}: return x + "2"')


def test_error_below_the_attempt_shows_the_attempts_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(x: int) -> Tensor:
        return torch.nn.functional.linear(torch.ones(2), torch.ones(3, 3))

    lines = verdict(DOUBLE, broken, capsys)
    assert any("in broken, line" in line and "linear(" in line for line in lines)


def test_error_in_the_check_blames_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    def verify(attempt: Any) -> None:
        attempt(3).shape  # noqa: B018

    lines = verdict(Exercise("shape", "a tensor", verify), lambda x: None, capsys)
    assert "AttributeError: 'NoneType' object has no attribute 'shape'" in lines[2]
    assert "raised while checking what it returned" in lines[3]


def test_pytorchs_not_implemented_error_is_no_stub(capsys: pytest.CaptureFixture[str]) -> None:
    def on_meta(x: int) -> int:
        return int(torch.ones(1, device="meta").nonzero().sum())

    def without_forward(x: int) -> Any:
        return torch.nn.Module()(x)

    for attempt in (on_meta, without_forward):
        lines = verdict(DOUBLE, attempt, capsys)
        assert lines[0] == "failed", lines
        assert any(f"in {attempt.__name__}, line" in line for line in lines)


def test_an_interrupt_goes_through() -> None:
    def interrupted(x: int) -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check(DOUBLE, interrupted)


def verify_sum(attempt: Any) -> None:
    def on_rank(attempt: Any) -> tuple[Tensor, list[str]]:
        from playbook_utils.measure.communication import record_communication

        with record_communication() as log:
            found = attempt(torch.tensor([1.0, dist.get_rank()]))
        return found, log

    for rank, (found, log) in enumerate(launch(on_rank, attempt, world_size=2)):
        expect_equal(found, torch.tensor([2.0, 1.0]), "sum", rank=rank, hint="all of them?")
        expect_calls(log, {"all_gather": 1}, rank=rank, hint="gather, then add")


SUM = Exercise("sum_over_ranks", "gather, then add", verify_sum)


def test_on_ranks_three_ways(capsys: pytest.CaptureFixture[str]) -> None:
    def stub(x: Tensor) -> Tensor:
        raise NotImplementedError("gather, then add up")

    def solution(x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.stack(parts).sum(0)

    def only_rank_0(x: Tensor) -> Tensor:
        return solution(x) if dist.get_rank() == 0 else solution(x) * 0

    def other_method(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def broken(x: Tensor) -> Tensor:
        return x.no_such_method()

    assert verdict(SUM, solution, capsys) == ["passed", "passed: sum_over_ranks"]
    expected = ["not solved yet", "not solved yet: gather, then add up"]
    assert verdict(SUM, stub, capsys) == expected
    assert verdict(SUM, only_rank_0, capsys) == [
        "failed",
        "failed: sum_over_ranks",
        "  sum on rank 1: found 0.0, expected 2.0 at index (0,); 2 of 2 elements differ",
        "  hint: all of them?",
    ]
    assert verdict(SUM, other_method, capsys)[2:] == [
        "  communication calls on rank 0: found {'all_reduce': 1}, expected {'all_gather': 1}",
        "  hint: gather, then add",
    ]
    lines = verdict(SUM, broken, capsys)
    assert lines[0] == "failed"
    assert any("no_such_method" in line for line in lines)


def test_launch_errors_are_read_by_their_causes(capsys: pytest.CaptureFixture[str]) -> None:
    def raises(*failures: RankFailure) -> Exercise:
        def verify(attempt: Any) -> None:
            raise LaunchError("ranks 0, 1 failed", failures)

        return Exercise("e", "task", verify)

    stub = RankFailure(0, "NotImplementedError: do it", "  raise NotImplementedError('do it')")
    bare = RankFailure(1, "NotImplementedError")
    torchs = RankFailure(1, "NotImplementedError: Could not run", "  x.nonzero()")
    other = RankFailure(1, "ValueError: no")
    failed = RankFailure(1, "CheckFailed", exception=CheckFailed("sum: found 1, expected 2"))
    assert verdict(raises(stub, bare), None, capsys)[1] == "not solved yet: do it"
    assert verdict(raises(bare), None, capsys)[1] == "not solved yet: task"
    assert verdict(raises(stub, other), None, capsys)[2] == "  ranks 0, 1 failed"
    assert verdict(raises(torchs), None, capsys)[0] == "failed"
    assert verdict(raises(), None, capsys)[0] == "failed"
    lines = verdict(raises(failed), None, capsys)
    assert lines[2] == "  on rank 1: sum: found 1, expected 2"


CELL = """from playbook_utils.checks import Exercise, check, expect_equal
exercise = Exercise("double", "twice", lambda attempt: expect_equal(attempt(3), 6, "double(3)"))
def double(x):
    return {body}
check(exercise, double)"""


def test_a_cell_shows_the_verdict_once() -> None:
    """In a real kernel: as the cell's last value, and before another statement."""
    cells = [CELL.format(body=body) for body in ("2 * x", "x.y")]
    notebook = nbformat.v4.new_notebook()
    for source in (cells[0], cells[0] + ";", cells[0] + "\nNone", cells[1], "check(exercise, 1)"):
        notebook.cells.append(nbformat.v4.new_code_cell(source))
    NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    outputs = [cell.outputs for cell in notebook.cells]
    assert all(len(shown) == 1 and shown[0].output_type == "stream" for shown in outputs)
    texts = [shown[0].text for shown in outputs]
    assert texts[:3] == ["passed: double\n"] * 3
    assert texts[3].splitlines() == [
        "failed: double",
        "  AttributeError: 'int' object has no attribute 'y'",
        "  in double, line 4: return x.y",
    ]
    assert "TypeError: 'int' object is not callable" in texts[4]


def message(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(CheckFailed) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_expect_equal() -> None:
    expect_equal([1, 2], [1, 2], "list")
    expect_equal(torch.Size([2, 3]), (2, 3), "shape")
    expect_equal(torch.arange(3), torch.arange(3), "tensor")
    assert message(expect_equal, 1, 2, "calls", rank=3) == "calls on rank 3: found 1, expected 2"
    t = torch.arange(6).reshape(2, 3)
    changed = t.clone()
    changed[1, 2] = 9
    assert "found 9, expected 5 at index (1, 2); 1 of 6 elements" in message(
        expect_equal, changed, t, "t"
    )
    assert "t: shape: found (6,), expected (2, 3)" in message(expect_equal, t.ravel(), t, "t")
    assert "t: dtype: found torch.float32, expected torch.int64" in message(
        expect_equal, t.float(), t, "t"
    )
    assert "t: type: found list, expected Tensor" in message(expect_equal, [1], t, "t")
    assert "found 1 (Tensor), expected 1 (int)" in message(expect_equal, torch.tensor(1), 1, "n")
    nan = torch.tensor([0.0, torch.nan])
    assert "found nan, expected 1.0 at index (1,)" in message(
        expect_equal, nan, torch.tensor([0.0, 1.0]), "t"
    )


def test_expect_close() -> None:
    expect_close(1.0 + 1e-9, 1.0, "x")
    expect_close(3, 3.0, "x")
    expect_close(torch.tensor(2.0), 2.0, "x")
    assert "found 1.01, expected 1.0" in message(expect_close, 1.01, 1.0, "x")
    message(expect_close, 1.0 + 1e-9, 1.0, "x", rtol=1e-12)
    expect_close(1.01, 1.0, "x", atol=0.02)
    one, other = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0 + 1e-7, 2.0, 3.1])
    found = message(expect_close, other, one, "x", rank=1, hint="h")
    assert "x on rank 1: found 3.0999" in found and "at index (2,); 1 of 3" in found
    assert found.endswith("\nhint: h")
    for wrong in (None, True, torch.ones(2), torch.nan):
        assert "expected 1.0" in message(expect_close, wrong, 1.0, "x")
    assert "dtype" in message(expect_close, one.double(), one, "x")


def test_expect_calls() -> None:
    events = [
        CollectiveEvent(0, i, op, (0, 1), "float32", (2,), 8, 8)
        for i, op in enumerate(["send", "recv", "send"])
    ]
    expect_calls(events, {"send": 2, "recv": 1, "all_reduce": 0})
    expect_calls(CommunicationLog(events), {"send": 2, "recv": 1})
    for expected in ({"send": 2}, {"send": 1, "recv": 1}, {"send": 2, "recv": 1, "barrier": 1}):
        assert "found {'send': 2, 'recv': 1}" in message(expect_calls, events, expected)


def test_an_attempt_that_exits_fails() -> None:
    def attempt() -> None:
        raise SystemExit(3)

    assert check(Exercise("e", "t", lambda attempt: attempt()), attempt).status == "failed"


def test_a_whole_number_is_not_a_float_nor_a_bool() -> None:
    told = "steps is 4, but its type: found float, expected int\nhint: a count is a whole number"
    with pytest.raises(CheckFailed, match=told):
        expect_equal(4.0, 4, "steps")
    with pytest.raises(CheckFailed, match="its type: found bool, expected int"):
        expect_equal(True, 1, "steps")
    with pytest.raises(CheckFailed, match=r"found 4\.5, expected 4"):
        expect_equal(4.5, 4, "steps")
    expect_equal(4, 4.0, "seconds")
