"""Everything that can go wrong in a rank ends at once, or at its timeout, and says where."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import shared_memory

import psutil
import pytest
import torch
import torch.distributed as dist

from playbook_utils.errors import LaunchError, LaunchTimeout
from playbook_utils.workers import launch
from tests.workers.conftest import files_left, shared_files


class Unpicklable(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


def caught(fn, *, world_size: int, **kwargs) -> LaunchError:
    """The error of a launch, after which no process of it is left."""
    before = shared_files()
    with pytest.raises(LaunchError) as error:
        launch(fn, world_size=world_size, **kwargs)
    left = [p for child in psutil.Process().children() for p in child.children(recursive=True)]
    assert left == [], "processes were left"
    assert files_left(before) == set()
    return error.value


def test_one_rank_raises_while_the_others_wait() -> None:
    def work() -> None:
        if dist.get_rank() == 1:
            raise ValueError("batch of 5 does not divide")
        dist.all_reduce(torch.ones(1))

    error = caught(work, world_size=4)
    assert error.rank == 1 and not isinstance(error, LaunchTimeout)
    assert isinstance(error.__cause__, ValueError)
    text = str(error)
    assert "rank 1 of 4 failed" in text and "ValueError: batch of 5 does not divide" in text
    assert 'raise ValueError("batch of 5 does not divide")' in text
    assert "ranks 0, 2, 3: all_reduce (workers/test_faults.py, line" in text
    assert "session.py" not in text and "worker.py" not in text


def test_the_same_exception_on_all_ranks_is_told_once() -> None:
    def work() -> None:
        raise KeyError("lr")

    error = caught(work, world_size=4)
    assert [f.rank for f in error.failures] == [0, 1, 2, 3]
    assert str(error).count("KeyError: 'lr'") == 1
    assert "ranks 0, 1, 2, 3: KeyError" in str(error)


def test_causes_of_an_exception_are_told() -> None:
    def work() -> None:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise RuntimeError("outer") from error

    text = str(caught(work, world_size=1))
    assert text.index("RuntimeError: outer") < text.index("caused by KeyError: 'inner'")


def test_an_exception_that_cannot_be_pickled() -> None:
    def work() -> None:
        raise Unpicklable("holds a lock")

    error = caught(work, world_size=2)
    assert "Unpicklable: holds a lock" in str(error)
    assert error.__cause__ is None and error.failures[0].exception is None


def test_an_exception_whose_init_takes_two_arguments_is_the_cause() -> None:
    class Coded(Exception):
        def __init__(self, code: int, text: str) -> None:
            super().__init__(f"{code}: {text}")
            self.code = code

    def work() -> None:
        raise Coded(3, "no")

    error = caught(work, world_size=1)
    assert isinstance(error.__cause__, Coded)
    assert error.__cause__.code == 3 and str(error.__cause__) == "3: no"


def test_what_fails_while_it_is_unpickled_says_so() -> None:
    class Gone:
        def __reduce__(self) -> tuple[object, ...]:
            return int, ("no number",)

    gone = Gone()
    text = str(caught(lambda: gone, world_size=2))
    assert "ValueError: invalid literal" in text
    assert "while receiving the function and its arguments" in text


def test_system_exit_is_an_error_not_an_end() -> None:
    assert "SystemExit: 4" in str(caught(lambda: sys.exit(4), world_size=2))


def test_a_killed_rank_names_the_signal() -> None:
    def work() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    error = caught(work, world_size=3)
    assert error.rank == 1 and "rank 1: killed by SIGKILL" in str(error)
    assert [f.rank for f in error.failures] == [1], "those that lost a peer are no causes"


def test_a_crash_in_compiled_code() -> None:
    assert "killed by SIGSEGV" in str(caught(lambda: ctypes.string_at(0), world_size=1))


def test_an_exit_names_its_code() -> None:
    def work() -> None:
        if dist.get_rank() == 0:
            os._exit(3)
        dist.barrier()

    error = caught(work, world_size=3)
    assert error.rank == 0 and "exited with code 3" in str(error)


def test_an_abort_is_explained() -> None:
    error = caught(os.abort, world_size=1)
    assert "SIGABRT" in str(error) and "differ in shape" in str(error)


def test_a_shape_mismatch_ends() -> None:
    """gloo aborts, or waits for bytes that never come: which of them depends on the sizes."""

    def work() -> None:
        dist.all_reduce(torch.ones(100 + 100 * dist.get_rank()))

    error = caught(work, world_size=2, collective_timeout_s=1)
    assert "SIGABRT" in str(error) or "all_reduce (workers/test_faults.py" in str(error)


def test_a_small_shape_mismatch_hangs_and_the_report_names_the_cure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work() -> None:
        dist.all_reduce(torch.ones(3 + dist.get_rank()))

    error = caught(work, world_size=2, collective_timeout_s=1)
    cure = 'os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL" before launch()'
    assert isinstance(error, LaunchTimeout) and "may differ in shape" in str(error)
    assert cure in str(error)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    error = caught(work, world_size=2, collective_timeout_s=1)
    assert "TensorShape=[3]" in str(error) and "TensorShape=[4]" in str(error)
    assert cure not in str(error)


def mismatched() -> None:
    if dist.get_rank() % 2 == 0:
        dist.all_reduce(torch.ones(1))
    else:
        dist.recv(torch.ones(1), 0)


@pytest.mark.parametrize("limit", [{"timeout_s": 2}, {"collective_timeout_s": 1}])
def test_mismatched_collectives_end_at_the_timeout(limit: dict) -> None:
    error = caught(mismatched, world_size=3, **limit)
    assert isinstance(error, LaunchTimeout) and error.failures == () and error.rank is None
    assert "ranks 0, 2: all_reduce (workers/test_faults.py, line" in str(error)
    assert "rank 1: recv (workers/test_faults.py, line" in str(error)
    assert set(error.positions) == {0, 1, 2}


@pytest.mark.parametrize("limit", [{"timeout_s": 2}, {"collective_timeout_s": 1}])
def test_a_rank_that_returns_early_deadlocks_the_others(limit: dict) -> None:
    def work() -> None:
        if dist.get_rank() != 1:
            dist.barrier()

    error = caught(work, world_size=3, **limit)
    assert isinstance(error, LaunchTimeout)
    assert "ranks 0, 2: barrier" in str(error) and "rank 1: had returned" in str(error)


def test_an_endless_loop_names_its_line() -> None:
    def work() -> None:
        rank = dist.get_rank()
        while rank == 0:
            pass

    error = caught(work, world_size=2, timeout_s=1.5)
    assert isinstance(error, LaunchTimeout)
    assert "rank 0 of 2 did not finish within 1.5 s" in str(error)
    assert "in work" in error.positions[0] and error.positions[1] == "had returned"


def test_output_before_a_failure_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        print("before the fault")
        if dist.get_rank() == 1:
            raise ValueError("fault")
        time.sleep(60)

    caught(work, world_size=3)
    out = capfd.readouterr().out.splitlines()
    assert out == [f"[rank {r}] before the fault" for r in range(3)]


def test_a_child_process_of_a_rank_is_ended(tmp_path) -> None:
    def work() -> int:
        return subprocess.Popen(["sleep", "60"], start_new_session=True).pid

    (pid,) = launch(work, world_size=1)
    assert not psutil.pid_exists(pid), "returned, yet its child runs on"


def test_a_child_that_prints_without_end_does_not_hold_a_launch_up() -> None:
    def work() -> None:
        subprocess.Popen(["yes"])
        time.sleep(0.2)
        raise ValueError("fault")

    assert caught(work, world_size=1).failures[0].summary == "ValueError: fault"


def test_shared_memory_of_a_killed_rank_is_removed() -> None:
    def work() -> None:
        shared_memory.SharedMemory(create=True, size=1000)
        os.kill(os.getpid(), signal.SIGKILL)

    caught(work, world_size=1)


def test_a_hundred_megabytes_of_output_are_cut(capfd: pytest.CaptureFixture[str]) -> None:
    def flood() -> None:
        for i in range(100_000):
            print(f"{i:06d}" + "x" * 994)

    launch(flood, world_size=1)
    out = capfd.readouterr().out
    assert len(out) < 200_000
    assert out.startswith("[rank 0] 000000xxx") and "bytes left out" in out
    assert "[rank 0] 099999xxx" in out.splitlines()[-1]


def test_progress_bars_leave_their_last_state(capfd: pytest.CaptureFixture[str]) -> None:
    def bar() -> None:
        for i in range(4):
            print(f"\r{i + 1}/4", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)

    launch(bar, world_size=2)
    assert capfd.readouterr().err.splitlines() == ["[rank 0] 4/4", "[rank 1] 4/4"]


def test_the_next_launch_after_each_fault_works() -> None:
    caught(mismatched, world_size=2, collective_timeout_s=0.5)
    assert launch(dist.get_world_size, world_size=2) == [2, 2]


def test_a_lost_server_is_told_and_replaced() -> None:
    launch(dist.get_rank, world_size=1)
    (server,) = psutil.Process().children()

    def kill_the_server() -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(Exception, match="forked from ended"):
        launch(kill_the_server, world_size=2)
    psutil.wait_procs([server], timeout=3)
    assert launch(dist.get_rank, world_size=2) == [0, 1]


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError("the data server's answer timed out after 10 s"),
        ConnectionResetError(104, "Connection reset by peer"),
        subprocess.TimeoutExpired(["sleep"], 0.2),
    ],
)
def test_a_programs_own_timeout_is_no_deadlock(error: Exception) -> None:
    def work() -> None:
        if dist.get_rank() == 0:
            raise error
        dist.barrier()

    found = caught(work, world_size=3)
    assert type(found) is LaunchError and found.rank == 0
    assert type(found.__cause__) is type(error)


def test_ranks_that_fail_a_moment_apart_are_all_named() -> None:
    def work() -> None:
        time.sleep(0.03 * dist.get_rank())
        raise ValueError("all of us")

    assert str(caught(work, world_size=5)).startswith("all 5 ranks failed")


def test_the_cause_may_come_after_its_victims() -> None:
    """Rank 0 loses its peer at once; why the peer left is known half a second later."""

    def work() -> None:
        dist.barrier()
        if dist.get_rank() == 1:
            dist.destroy_process_group()
            time.sleep(0.4)
            raise ValueError("the cause")
        dist.all_reduce(torch.ones(1))

    error = caught(work, world_size=2)
    assert [f.rank for f in error.failures] == [1], str(error)


def test_an_exception_that_only_the_worker_can_import(tmp_path) -> None:
    (tmp_path / "onlyhere.py").write_text("class Lost(Exception):\n    pass\n")

    def work() -> None:
        sys.path.insert(0, str(tmp_path))
        import onlyhere

        raise onlyhere.Lost("text arrives")

    error = caught(work, world_size=1)
    assert "onlyhere.Lost: text arrives" in str(error) and error.__cause__ is None


def test_a_real_time_signal_has_no_name_but_a_number() -> None:
    def work() -> None:
        os.kill(os.getpid(), 35)
        time.sleep(10)

    assert "killed by signal 35" in str(caught(work, world_size=1))


def test_a_flood_of_a_rank_that_waits_for_the_others_is_shown_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def work() -> None:
        if dist.get_rank() == 0:
            time.sleep(1)
        else:
            for _ in range(3000):
                print("y" * 99)

    launch(work, world_size=2)
    out = capfd.readouterr().out
    assert out.count("bytes left out") == 1
    shown = sum(len(line) - 8 for line in out.splitlines() if "yyy" in line)
    (left_out,) = [line for line in out.splitlines() if "left out" in line]
    assert shown + int(left_out.split()[3].replace(",", "")) == 3000 * 100


def test_a_rank_that_dies_after_its_answer_has_answered() -> None:
    def work() -> int:
        if dist.get_rank() == 1:
            threading.Timer(0.1, os._exit, [7]).start()
        else:
            time.sleep(0.6)
        return dist.get_rank()

    assert launch(work, world_size=2) == [0, 1]
