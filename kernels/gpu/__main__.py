"""`python -m kernels.gpu [word ...]`: see the package's docstring."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence

import torch

from kernels.gpu.case import Case
from kernels.gpu.table import Outcome, report, selected

__all__ = ["main"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _cuda(words: Sequence[str]) -> Outcome:
    from kernels.gpu import cuda_cases as cases

    if shutil.which("nvcc") is None:
        print("CUDA C++ kernels skipped: no nvcc on PATH (install the CUDA toolkit).")
        return Outcome(not_run={"CUDA C++": "no nvcc"})
    checked = [*cases.cuda_cases("cuda", cases.ODD), *cases.cuda_cases("cuda", cases.TIMED)]
    timed = cases.cuda_cases("cuda", cases.LARGE)
    return report(selected(timed, words), selected(checked, words), print)


def _triton(words: Sequence[str]) -> Outcome:
    """Timed in bf16; checked in each dtype, at odd sizes and on the paths that are timed."""
    from kernels.gpu import triton_cases as cases
    from kernels.gpu.config_cases import config_cases

    checked: list[Iterator[Case]] = []
    for dtype in DTYPES:
        for sizes in (cases.ODD, cases.TIMED):
            checked += cases.triton_cases("cuda", sizes, dtype)
        checked += config_cases("cuda", cases.TIMED, dtype)
    timed = cases.triton_cases("cuda", cases.LARGE)
    return report(selected(timed, words), selected(checked, words), print)


def main(words: Sequence[str]) -> int:
    """0 if all is right, or there is no GPU; 1 if a kernel failed; 2 if nothing was checked."""
    if not torch.cuda.is_available():
        print("make gpu: no CUDA device here, nothing was run (make unit runs them on the CPU).")
        return 0
    from kernels import triton

    if triton.INTERPRETED:
        print("make gpu: TRITON_INTERPRET=1 is set, which would take hours here; unset it.")
        return 1
    torch.backends.cuda.matmul.allow_tf32 = False  # fp32 against fp32
    gpu = torch.cuda.get_device_properties(0)
    print(f"{gpu.name}, sm_{gpu.major}{gpu.minor}, PyTorch {torch.__version__}")
    outcomes = [_cuda(words), _triton(words)]
    failed = sum(outcome.failed for outcome in outcomes)
    agreed = sum(len(outcome.agreed) for outcome in outcomes)
    not_run = [f"{name} ({why})" for each in outcomes for name, why in each.not_run.items()]
    left = f"not run: {', '.join(not_run) or 'none'}"
    if failed:
        print(f"{failed} failed; {left}")
        return 1
    if not agreed:
        print(f"nothing was checked: no kernel's name contains any of {list(words)}; {left}")
        return 2
    print(f"{agreed} cases agree with their references; {left}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
