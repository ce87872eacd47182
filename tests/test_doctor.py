from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from playbook_utils import doctor
from playbook_utils.doctor import Finding, Machine, diagnose, judge

GIB = 2**30
GPU = {"name": "NVIDIA H100", "memory_bytes": 80 * GIB}
CPU_PROBE: dict[str, Any] = {
    "torch": {"works": {"version": "2.13.0+cpu", "cuda": None}},
    "gpus": {"works": []},
    "gloo": {"works": "all-reduce works"},
    "nccl": {"error": "RuntimeError: not in this build of PyTorch"},
    "triton": {"works": "3.9.0"},
}
CUDA_PROBE = CPU_PROBE | {
    "torch": {"works": {"version": "2.13.0+cu130", "cuda": "13.0"}},
    "gpus": {"works": [GPU, GPU]},
    "nccl": {"works": "2.28.9"},
}
LAPTOP = Machine((3, 12, 1), "Linux", 4, 16 * GIB, CPU_PROBE, cxx="g++ 13")
SERVER = Machine(
    (3, 12, 1), "Linux", 64, 512 * GIB, CUDA_PROBE, (GPU["name"],) * 2, "13.0", "g++ 13"
)


def statuses(machine: Machine) -> dict[str, str]:
    return {finding.name: finding.status for finding in judge(machine)}


def finding(machine: Machine, name: str) -> Finding:
    (found,) = [f for f in judge(machine) if f.name == name]
    return found


def test_server_with_gpus_lacks_nothing() -> None:
    assert set(statuses(SERVER).values()) == {"ok"}
    assert finding(SERVER, "GPUs").found == "2 x NVIDIA H100, 80 GiB"
    assert finding(SERVER, "torch").found == "2.13.0 (CUDA 13.0 build)"


def test_laptop_without_gpu() -> None:
    lacking = {name: status for name, status in statuses(LAPTOP).items() if status != "ok"}
    expected = {"GPUs": "missing", "nccl": "missing", "triton": "limited", "nvcc": "missing"}
    assert lacking == expected
    assert finding(LAPTOP, "torch").found == "2.13.0 (CPU build)"


@pytest.mark.parametrize(
    ("change", "name", "status", "says"),
    [
        ({"python": (3, 9, 2)}, "python", "missing", "PYTHON="),
        ({"system": "Darwin"}, "workers", "limited", "seconds"),
        ({"system": "Windows"}, "workers", "missing", "WSL2"),
        ({"cores": 1}, "cores", "limited", "nothing overlaps"),
        ({"memory_bytes": 2 * GIB}, "memory", "limited", "killed"),
        ({"cxx": None}, "g++", "missing", "apt install g++"),
        ({"driver_gpus": ("NVIDIA T4",)}, "GPUs", "limited", "without CPU=1"),
        ({"other_kernels": "0.17.2"}, "kernels", "limited", "pip uninstall kernels"),
        ({"probe": {}}, "torch", "missing", "make setup"),
        ({"probe": CPU_PROBE | {"gloo": {"error": "E"}}}, "gloo", "missing", "/etc/hosts"),
        ({"probe": CPU_PROBE | {"triton": {"error": "E"}}}, "triton", "missing", "make setup"),
    ],
)
def test_each_lack_says_what_it_costs_and_what_to_do(
    change: dict[str, Any], name: str, status: str, says: str
) -> None:
    found = finding(dataclasses.replace(LAPTOP, **change), name)
    assert found.status == status
    assert says in f"{found.costs} {found.remedy}"
    assert found.costs


def test_gpu_that_a_cuda_build_cannot_use_is_not_blamed_on_the_build() -> None:
    probe = CUDA_PROBE | {"gpus": {"works": []}}
    found = finding(dataclasses.replace(SERVER, probe=probe), "GPUs")
    assert found.status == "limited"
    assert "driver" in found.remedy


def test_one_gpu_is_not_enough_for_nccl() -> None:
    probe = CUDA_PROBE | {"gpus": {"works": [GPU]}}
    found = finding(dataclasses.replace(SERVER, probe=probe), "nccl")
    assert (found.status, found.found) == ("limited", "2.28.9, but 1 GPU")


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (
            {"kernels-0.17.2.dist-info/METADATA": "Name: kernels\nVersion: 0.17.2\n"},
            "is installed: 0.17.2",
        ),
        ({"kernels/__init__.py": "from .hub import load"}, "is found first: {folder}/kernels/__i"),
        ({"kernels.py": ""}, "is found first: {folder}/kernels.py"),
        ({"kernels/load.py": ""}, None),  # no package at all: a real one behind it wins
    ],
)
def test_kernels_of_somebody_else(
    files: dict[str, str], found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_run_probe", lambda: CPU_PROBE)
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    names = {finding.name for finding in diagnose()}
    assert "kernels" not in names, "this course's own is nothing to report"

    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    said = [finding.found for finding in diagnose() if finding.name == "kernels"]
    expected = [] if found is None else [found.format(folder=tmp_path)]
    assert len(said) == len(expected)
    assert all(text in line for text, line in zip(expected, said, strict=True))


def test_this_machine() -> None:
    """Against what can be told by other means; and asking must not import torch, let alone CUDA."""
    code = (
        "import dataclasses, json, sys\n"
        "from playbook_utils.doctor import diagnose\n"
        "print(json.dumps([dataclasses.asdict(finding) for finding in diagnose()]))\n"
        "assert 'torch' not in sys.modules\n"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
    found = {f["name"]: Finding(**f) for f in json.loads(printed)}
    import torch

    assert found["python"].found == ".".join(map(str, sys.version_info[:3]))
    assert found["torch"].found.startswith(torch.__version__.split("+")[0])
    assert found["gloo"].status == "ok", found["gloo"]
    assert shutil.which("nvidia-smi") or found["GPUs"].status == "missing"
    if found["triton"].status == "missing":
        assert "ModuleNotFoundError" in found["triton"].found, "installed, but does not work"
    if nvcc := shutil.which("nvcc"):
        version = subprocess.check_output([nvcc, "--version"], text=True)
        assert f"release {found['nvcc'].found.removeprefix('CUDA ')}," in version
    for f in found.values():
        assert bool(f.costs) == (f.status != "ok"), f
