"""What this machine can run: each piece the course uses, what its lack costs, how to get it.

Left out: speed. The lessons measure that.

    from playbook_utils.doctor import diagnose
    for finding in diagnose():
        print(finding.name, finding.status, finding.found)

PyTorch, gloo, CUDA and Triton are tried in a process of their own
(`playbook_utils.doctor_probe`), so asking never initialises CUDA here.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Finding", "Machine", "diagnose", "inspect_machine", "judge"]

_GIB = 2**30
_NO_GPU = "Triton and CUDA kernels run on the CPU, slowly; no GPU timings."
_WSL = "On Windows work inside WSL2."


@dataclass(frozen=True)
class Finding:
    """One piece of the machine."""

    name: str
    status: str
    """"ok", "limited" (works, but less than the course can use) or "missing"."""
    found: str
    """What is there: a version, a count."""
    costs: str = ""
    """What does not work, or works worse, for want of it; empty when ok."""
    remedy: str = ""
    """How to get it; empty when ok or when nothing can be done."""
    required: bool = False
    """Whether no lesson runs without it."""


@dataclass(frozen=True)
class Machine:
    """The bare facts that `judge` turns into findings."""

    python: tuple[int, int, int]
    system: str
    """`platform.system()`: "Linux", "Darwin", "Windows"."""
    cores: int
    memory_bytes: int
    probe: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What `doctor_probe.probe` returned."""
    driver_gpus: tuple[str, ...] = ()
    """GPUs that the NVIDIA driver lists, whether or not PyTorch can use them."""
    nvcc: str | None = None
    cxx: str | None = None
    other_kernels: str | None = None
    """A package `kernels` that is not this course's, which Python may import in its place."""


def diagnose() -> list[Finding]:
    """Look at this machine (a few seconds): one `Finding` a piece, the necessary ones first."""
    return judge(inspect_machine())


def inspect_machine() -> Machine:
    """Gather the facts; starts a few short processes, changes nothing."""
    nvcc = re.search(r"release ([\d.]+)", _output_of("nvcc", "--version"))
    driver = _output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    compiler = "clang++" if platform.system() == "Darwin" else "g++"
    version = _output_of(compiler, "--version").splitlines()
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return Machine(
        python=sys.version_info[:3],
        system=platform.system(),
        cores=cores,  # those this process may run on
        memory_bytes=_usable_memory_bytes(),
        probe=_run_probe(),
        driver_gpus=tuple(line.strip() for line in driver.splitlines() if line.strip()),
        nvcc=nvcc.group(1) if nvcc else None,
        cxx=version[0] if version else None,
        other_kernels=_other_kernels(),
    )


def judge(machine: Machine) -> list[Finding]:
    """Turn facts into findings; pure, so that any machine can be described in a test."""
    version = ".".join(map(str, machine.python))
    remedy = "Install Python 3.10 or newer, then `make clean` and `make lab PYTHON=...`."
    findings = [
        _judge("python", machine.python >= (3, 10), version, "No lesson runs.", remedy, True),
        _judge_torch(machine),
        _judge_gloo(machine),
        _judge_system(machine),
        _judge_gpus(machine),
        _judge_nccl(machine),
        _judge_triton(machine),
    ]
    costs = "CUDA C++ kernels run through the CPU emulator only; none is compiled for a GPU."
    remedy = "NVIDIA's CUDA toolkit, of the CUDA version PyTorch was built with."
    found = f"CUDA {machine.nvcc}" if machine.nvcc else "none"
    findings.append(_judge("nvcc", bool(machine.nvcc), found, costs, remedy))
    compiler = "clang++" if machine.system == "Darwin" else "g++"
    costs = "No C++ operators, no CUDA emulator, and torch.compile does not work on the CPU."
    packages = {"Darwin": "`xcode-select --install`.", "Linux": "`sudo apt install g++`."}
    remedy = packages.get(machine.system, _WSL)
    findings.append(_judge(compiler, bool(machine.cxx), machine.cxx or "none", costs, remedy))
    return [*findings, *_judge_sizes(machine), *_judge_kernels(machine)]


def _judge(
    name: str, works: bool, found: str, costs: str, remedy: str, required: bool = False
) -> Finding:
    if works:
        return Finding(name, "ok", found, required=required)
    return Finding(name, "missing", found, costs, remedy, required)


def _judge_torch(machine: Machine) -> Finding:
    torch = machine.probe.get("torch", {})
    found = torch.get("error", "not tried")
    if "works" in torch:
        cuda = torch["works"]["cuda"]
        version = str(torch["works"]["version"]).split("+")[0]
        found = f"{version} (CUDA {cuda} build)" if cuda else f"{version} (CPU build)"
    return _judge("torch", "works" in torch, found, "No lesson runs.", "`make setup`.", True)


def _judge_gloo(machine: Machine) -> Finding:
    gloo = machine.probe.get("gloo", {})
    found = gloo.get("works") or gloo.get("error", "not tried")
    costs = "Workers cannot talk to each other on the CPU: no lesson from 05 on runs."
    remedy = "Use PyTorch's own wheels; see that this machine's name resolves (/etc/hosts)."
    return _judge("gloo", "works" in gloo, found, costs, remedy, True)


def _judge_system(machine: Machine) -> Finding:
    if machine.system == "Linux":
        return Finding("workers", "ok", "Linux: forked from a small server")
    if machine.system == "Darwin":
        costs, remedy = "Each launch takes seconds, not a tenth of one.", "Linux, or a container."
        return Finding("workers", "limited", "macOS: spawned afresh", costs, remedy)
    costs = "The launcher needs POSIX: no workers from a cell."
    return Finding("workers", "missing", machine.system, costs, _WSL)


def _judge_gpus(machine: Machine) -> Finding:
    gpus = machine.probe.get("gpus", {}).get("works") or []
    if gpus:
        names = [f"{gpu['name']}, {gpu['memory_bytes'] / _GIB:.0f} GiB" for gpu in gpus]
        return Finding("GPUs", "ok", _count(names))
    if not machine.driver_gpus:
        remedy = "Not needed. To see GPU timings use a machine with an NVIDIA GPU."
        return Finding("GPUs", "missing", "none", _NO_GPU, remedy)
    found = f"{_count(list(machine.driver_gpus))}, which PyTorch cannot use"
    if machine.probe.get("torch", {}).get("works", {}).get("cuda"):
        remedy = "Update the NVIDIA driver; see that CUDA_VISIBLE_DEVICES does not hide the GPU."
    else:
        remedy = "This is PyTorch's CPU build: `make clean`, then `make lab` without CPU=1."
    return Finding("GPUs", "limited", found, _NO_GPU, remedy)


def _judge_nccl(machine: Machine) -> Finding:
    nccl = machine.probe.get("nccl", {})
    gpu_count = len(machine.probe.get("gpus", {}).get("works") or [])
    costs = "Workers talk through gloo, on the CPU; same results."
    if "works" not in nccl:
        found = nccl.get("error", "not tried").removeprefix("RuntimeError: ")
        remedy = "Comes with PyTorch's CUDA build, for Linux."
        return Finding("nccl", "missing", found, costs, remedy)
    if gpu_count >= 2:
        return Finding("nccl", "ok", nccl["works"])
    found = f"{nccl['works']}, but {gpu_count} GPU{'' if gpu_count == 1 else 's'}"
    return Finding("nccl", "limited", found, costs, "Needs two GPUs or more: one per rank.")


def _judge_triton(machine: Machine) -> Finding:
    triton = machine.probe.get("triton", {})
    if "works" not in triton:
        costs = "Triton kernels do not run; their lessons skip those cells."
        remedy = "`make setup`." if machine.system == "Linux" else f"Needs Linux. {_WSL}"
        return Finding("triton", "missing", triton.get("error", "not tried"), costs, remedy)
    if machine.probe.get("gpus", {}).get("works"):
        return Finding("triton", "ok", f"{triton['works']}, compiled for the GPU")
    costs = "Kernels give right results at small sizes; no speed, no arithmetic in bfloat16."
    found = f"{triton['works']}, by its interpreter on the CPU"
    return Finding("triton", "limited", found, costs, "A machine with an NVIDIA GPU.")


def _judge_kernels(machine: Machine) -> list[Finding]:
    if machine.other_kernels is None:  # that the course's own is there goes without saying
        return []
    costs = "`import kernels` gives that, or a mixture of both: lessons 18 to 20 do not run."
    remedy = (
        "`make lab` gives the course an environment of its own; in this one, "
        "`pip uninstall kernels`, then `pip install -e .` once more."
    )
    return [Finding("kernels", "limited", machine.other_kernels, costs, remedy)]


def _judge_sizes(machine: Machine) -> list[Finding]:
    cores, memory = str(machine.cores), f"{machine.memory_bytes / _GIB:.1f} GiB"
    findings = [Finding("cores", "ok", cores), Finding("memory", "ok", memory)]
    if machine.cores < 2:
        costs = "Workers take turns: results are the same, nothing overlaps."
        findings[0] = Finding("cores", "limited", cores, costs, "Two cores are enough.")
    if machine.memory_bytes < 4 * _GIB:
        costs = "Lessons with eight workers may be killed by the system."
        remedy = "4 GiB are enough: raise the container's limit."
        findings[1] = Finding("memory", "limited", memory, costs, remedy)
    return findings


def _count(names: list[str]) -> str:
    """["A", "A", "B"] as "2 x A; 1 x B"."""
    return "; ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _output_of(program: str, *arguments: str) -> str:
    """What a program prints, or "" where it is missing, fails or does not end."""
    command = [program, *arguments]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=20)
    return ""


def _other_kernels() -> str | None:
    """A package `kernels` of somebody else's (Hugging Face has one), installed or found first."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f"another package of this name is installed: {importlib.metadata.version('kernels')}"
    spec = importlib.util.find_spec("kernels")
    own = Path(__file__).resolve().parent.parent / "kernels"
    if spec is None or spec.origin is None or Path(spec.origin).resolve().is_relative_to(own):
        return None
    return f"another package of this name is found first: {spec.origin}"


def _run_probe() -> dict[str, dict[str, Any]]:
    """Run `doctor_probe`; where it crashes, the pieces it reports on are all broken."""
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)
    command = [sys.executable, "-m", "playbook_utils.doctor_probe"]
    env = os.environ | {"PYTHONPATH": path}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
        found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
        return found
    except subprocess.TimeoutExpired:
        error = "trying it took more than 120 s"
    except (IndexError, ValueError):
        last_line = (done.stderr.strip() or "no message").splitlines()[-1]
        error = f"trying it ended with exit status {done.returncode}: {last_line}"
    return {name: {"error": error} for name in ("torch", "gpus", "gloo", "nccl", "triton")}


def _usable_memory_bytes() -> int:
    """The machine's memory, or the container's limit where that is less."""
    import psutil

    total: int = psutil.virtual_memory().total
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else ""
    return min(total, int(text)) if text.isdigit() else total
