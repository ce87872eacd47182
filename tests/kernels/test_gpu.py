"""`make gpu` without a GPU: its cases, small, on the emulator and the interpreter; its table."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import pytest
import torch

import kernels.triton
from kernels.gpu import __main__ as command
from kernels.gpu import cuda_cases, triton_cases
from kernels.gpu.__main__ import main
from kernels.gpu.case import Case, NotRunError, WrongResultError
from kernels.gpu.config_cases import config_cases
from kernels.gpu.table import Outcome, report
from kernels.triton.fp8_matmul import CONFIGS

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run make gpu")


def fake(name: str, found: float, expected: float = 1.0, seconds: float = 0.002) -> Case:
    """A case that computes `found`, with times that are given."""

    class Timed(Case):
        def time_s(self) -> dict[str, float]:
            return {"kernel": seconds, "cuBLAS": seconds / 2}

    return Timed(
        name,
        torch.float32,
        lambda: (torch.tensor([found]),),
        lambda: (torch.tensor([expected], dtype=torch.float64),),
        flops=4 * 10**9,
    )


def every(groups: Iterable[Iterable[Case]]) -> Iterator[Case]:
    return itertools.chain.from_iterable(groups)


class TestCases:
    @no_gpu
    def test_cuda_cases_agree_on_the_emulator(self) -> None:
        names = []
        for case in every(cuda_cases.cuda_cases("cpu", cuda_cases.ODD)):
            assert case.check() <= 1
            names.append(case.name)
        assert len(names) == len(set(names)) == 17

    @no_gpu
    def test_triton_cases_agree_in_the_interpreter(self) -> None:
        names = []
        for case in every(triton_cases.triton_cases("cpu", triton_cases.ODD)):
            assert case.check() <= 1
            names.append(case.name)
        assert len(names) == len(set(names)) == 17

    @no_gpu
    def test_a_launch_that_does_nothing_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Although the buffer holds the right numbers, of the kernel before."""
        cuda_cases._kernel.cache_clear()
        cases = list(every(cuda_cases.cuda_cases("cpu", cuda_cases.ODD)))
        for case in cases:
            for output, exact in zip(case.outputs, case.reference(), strict=False):
                output.copy_(exact)
        monkeypatch.setattr(cuda_cases, "load", lambda *_, **__: _Nothing())
        monkeypatch.setattr(cuda_cases, "Kernel", _Nothing)
        try:
            for case in cases:
                if case.name == "cuda sum_atomic":  # its buffer is set to zero first
                    continue
                with pytest.raises(WrongResultError, match="by nan"):
                    case.check()
        finally:
            cuda_cases._kernel.cache_clear()

    def test_old_memory_is_no_result(self) -> None:
        def writes_nothing() -> tuple[torch.Tensor]:
            right = torch.ones(1 << 12)
            del right
            return (torch.empty(1 << 12),)

        case = Case("c", torch.float32, writes_nothing, lambda: (torch.ones(1 << 12).double(),))
        with pytest.raises(WrongResultError, match="by nan"):
            case.check()
        assert torch.get_deterministic_debug_mode() == 0

    @no_gpu
    def test_each_configuration_is_checked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        names = [case.name for case in every(config_cases("cpu", triton_cases.ODD))]
        assert len(names) == len(set(names)) == 5 + 3 + 2 * (6 + 5 + 5)
        of_fp8 = list(config_cases("cpu", triton_cases.ODD)[1])
        assert all(case.check() <= 1 for case in of_fp8)
        monkeypatch.setitem(CONFIGS[1].kwargs, "GROUP_M", 0)  # wrong, and not the one tuned here
        assert of_fp8[0].check() <= 1
        with pytest.raises(Exception):  # noqa: B017 (division by zero, or wrong numbers)
            of_fp8[1].check()

    @no_gpu
    def test_gradients_start_from_a_tensor_made_once(self) -> None:
        """Making it is no part of the time: the second run makes no integers."""
        case = next(
            case
            for case in every(triton_cases.triton_cases("cpu", triton_cases.ODD))
            if case.name == "triton softmax + backward"
        )
        case.run()
        with torch.profiler.profile() as profile:
            case.run()
        assert "aten::arange" not in {event.name for event in profile.events()}

    def test_a_wrong_number_is_an_error(self) -> None:
        assert fake("near", 1.00001).check() == pytest.approx(0.5, rel=0.05)
        with pytest.raises(WrongResultError, match=r"off: result 0 differs from fp64 by 1.0e-04"):
            fake("off", 1.0001).check()
        with pytest.raises(WrongResultError, match="by nan"):
            fake("nan", float("nan")).check()

    def test_rates(self) -> None:
        assert fake("a", 1.0).rate(0.002) == "2.0 TFLOP/s"
        case = Case("b", torch.float32, lambda: (), lambda: (), moved_bytes=6 * 10**9)
        assert case.rate(0.002) == "3000 GB/s"


class _Nothing:
    """In place of a module, and of its kernels: a launch that does nothing."""

    def __getattr__(self, name: str) -> _Nothing:
        return self

    def __getitem__(self, where: object) -> object:
        return lambda *arguments: None


class TestReport:
    def test_table(self) -> None:
        lines: list[str] = []
        cases = [fake("right", 1.0), fake("wrong", 2.0)]
        outcome = report([cases], [cases], lines.append)
        assert outcome.failed == 1 and outcome.agreed == {"right"}
        assert lines[0].split()[:4] == ["wrong", "float32", "FAILED", "WrongResultError:"]
        assert lines[2].split() == (
            ["right", "float32", "0.00", "2.000", "2.0", "TFLOP/s", "cuBLAS", "1.000", "(0.50)"]
        )
        assert len(lines) == 3  # a kernel that is wrong is not timed

    def test_right_and_then_wrong_is_wrong(self) -> None:
        """A name is checked in several dtypes and sizes; the worst counts."""
        lines: list[str] = []
        checked = [fake("a", 1.00001), fake("a", 1.0), fake("b", 1.0), fake("b", 2.0)]
        outcome = report([[fake("a", 1.0), fake("b", 1.0)]], [checked], lines.append)
        assert outcome.agreed == {"a"} and outcome.failed == 1
        assert lines[2].split()[:3] == ["a", "float32", "0.50"] and len(lines) == 3

    def test_a_case_that_cannot_be_built_ends_its_group_alone(self) -> None:
        def cases() -> Iterator[Case]:
            yield fake("right", 1.0)
            raise OSError("nvcc: not here\nmore")

        lines: list[str] = []
        outcome = report([], [cases(), [fake("next", 1.0)]], lines.append)
        assert outcome.failed == 1 and outcome.agreed == {"right", "next"}
        assert lines[0].endswith("FAILED  OSError: nvcc: not here")

    def test_what_the_gpu_lacks_is_not_run_and_no_failure(self) -> None:
        def lacking() -> tuple[torch.Tensor]:
            raise NotRunError("needs FP8")

        lines: list[str] = []
        case = dataclasses.replace(fake("fp8", 1.0), run=lacking)
        outcome = report([[case]], [[case, case]], lines.append)
        assert outcome.failed == 0 and not outcome.agreed
        assert outcome.not_run == {"fp8": "needs FP8"} and len(lines) == 2


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU as far as the command can see; what it finds is to be set."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="G", major=9, minor=0)
    )
    monkeypatch.setattr(kernels.triton, "INTERPRETED", False)
    monkeypatch.setattr(command, "_cuda", lambda words: Outcome(not_run={"CUDA C++": "no nvcc"}))
    monkeypatch.setattr(command, "_triton", lambda words: Outcome())
    return monkeypatch


class TestLastLine:
    def test_nothing_checked_is_not_agreement(
        self, gpu: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["mamtul"]) == 2
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith("nothing was checked: no kernel's name contains any of ['mamtul']")

    def test_counts_and_names_what_was_left_out(
        self, gpu: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        gpu.setattr(command, "_triton", lambda words: Outcome(shares={"a": 0.1, "b": 0.2}))
        assert main([]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == (
            "2 cases agree with their references; not run: CUDA C++ (no nvcc)"
        )
        gpu.setattr(command, "_triton", lambda words: Outcome(failed=3, shares={"a": 0.1}))
        assert main([]) == 1
        assert capsys.readouterr().out.splitlines()[-1].startswith("3 failed; not run: CUDA")

    def test_refuses_to_interpret(
        self, gpu: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        gpu.setattr(kernels.triton, "INTERPRETED", True)
        assert main([]) == 1
        assert capsys.readouterr().out.startswith("make gpu: TRITON_INTERPRET=1 is set")


@no_gpu
class TestWithoutGpu:
    def test_says_so_in_one_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([]) == 0
        assert capsys.readouterr().out.startswith("make gpu: no CUDA device here")

    def test_as_a_command(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "kernels.gpu"], capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0 and done.stdout.count("\n") == 1 and not done.stderr
