"""The same call under torchrun: one node of two processes, and two nodes on loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from playbook_utils.workers import launch
from playbook_utils.workers import torchrun as torchrun_module

SCRIPT = """
import datetime, os, time, torch, torch.distributed as dist
from playbook_utils.workers import launch, prewarm, torchrun

def work(scale):
    total = torch.ones(2) * dist.get_rank() * scale
    dist.all_reduce(total)
    return dist.get_rank(), total.tolist()

prewarm()
first = launch(work, 1, world_size=2)
second = launch(work, 10, world_size=4)
made = launch(lambda: (lambda: 3), world_size=2)
assert [function() for function in made] == [3] * dist.get_world_size()
if int(os.environ["RANK"]) == 0:
    print("RESULT", first, second)

# A rank that comes to the end late is waited for, whatever the patience with a group.
torchrun.PATIENCE = datetime.timedelta(seconds=0.2)
group = dist.new_group()
if int(os.environ["RANK"]) == 1:
    time.sleep(1)
"""


Torchrun = Callable[..., subprocess.Popen[str]]
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def torchrun() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts torchrun on a script; whatever still runs at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(script: Path, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "torch.distributed.run", *options, str(script)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, env=env, start_new_session=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


FAILING = """
import sys, torch, torch.distributed as dist
from playbook_utils.workers import launch

def work():
    if dist.get_rank() == 1:
        raise ERROR
    dist.barrier()

launch(work, world_size=2)
"""


@pytest.mark.parametrize("error", ["ValueError('the cause')", "SystemExit(5)"])
def test_a_failing_rank_ends_all_at_once_and_is_named(
    torchrun: Torchrun, tmp_path: Path, error: str
) -> None:
    """It must not wait at exit for ranks that wait for it: here 30 minutes, gloo's timeout."""
    script = tmp_path / "lesson.py"
    script.write_text(FAILING.replace("ERROR", error))
    process = torchrun(script, "--standalone", "--nproc-per-node", "2")
    _, err = process.communicate(timeout=100)
    assert process.returncode != 0
    assert "rank      : 1 (local_rank: 1)" in err.partition("Root Cause")[2]


LATE = """
import atexit, ctypes, os, sys, time

def last():
    sys.setswitchinterval(1000)
    keep = ctypes.PyDLL(None)  # its calls keep the interpreter's lock
    keep.read(read, ctypes.create_string_buffer(1), 1)  # the peer has come
    keep.usleep(200_000)  # the thread has done its work, and waits for the lock

atexit.register(last)  # before all others, so it runs after them
import torch, torch.distributed as dist
from playbook_utils.workers import launch

class Wrapper:
    pass

def work():
    global wrapper
    wrapper = Wrapper()
    wrapper.hook, wrapper.group, wrapper.tensor = wrapper, dist.new_group(), torch.ones(1)
    if rank == 0:
        dist.all_reduce(wrapper.tensor, group=wrapper.group, async_op=True)
        del wrapper.tensor

read, write = os.pipe()
rank = int(os.fork() == 0)
os.environ["RANK"] = str(rank)
launch(work, world_size=2)
if rank == 0:
    os.close(write)
    RANK_0
else:
    dist.barrier(async_op=True)
    time.sleep(1)
    dist.all_reduce(torch.ones(1), group=wrapper.group)
    dist.barrier(wrapper.group, async_op=True)
    dist.barrier(async_op=True)
    time.sleep(0.5)
    os.write(write, b"x")
    os._exit(0)
"""


@pytest.mark.parametrize(
    "rank_0",
    ["pass", "del wrapper; dist.destroy_process_group()"],
    ids=["a global holds it", "a cycle holds it and the script leaves"],
)
def test_no_thread_of_a_group_waits_for_the_interpreter_as_it_ends(rank_0: str) -> None:
    """The work of a group ends late. Python ends a thread that waits for it by an abort."""
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env = {**os.environ, **variables, "GLOO_SOCKET_IFNAME": "lo"}
    script = LATE.replace("RANK_0", rank_0)
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_gpus_that_are_too_few_are_an_error_not_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes on this machine, and 1 GPUs"):
        torchrun_module.run(print, (), 2, None, None)


def test_more_ranks_than_one_machine_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "3",
        "WORLD_SIZE": "512",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    calls = []
    monkeypatch.setattr(torchrun_module, "run", lambda *args: calls.append(args[2:4]) or [])
    launch(print, world_size=512, backend="nccl")
    assert calls == [(512, "nccl")]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_two_processes_of_one_node(torchrun: Torchrun, tmp_path: Path) -> None:
    script = tmp_path / "lesson.py"
    script.write_text(SCRIPT)
    out, err = torchrun(script, "--standalone", "--nproc-per-node", "2").communicate(timeout=120)
    results = "[(0, [1.0, 1.0]), (1, [1.0, 1.0])] [(0, [10.0, 10.0]), (1, [10.0, 10.0])]"
    assert out.splitlines() == [f"RESULT {results}"]
    assert "launch(world_size=4) runs on the 2 ranks that torchrun started" in err
    assert "Error" not in err


def test_two_nodes_on_loopback(torchrun: Torchrun, tmp_path: Path) -> None:
    script = tmp_path / "lesson.py"
    script.write_text(SCRIPT)
    port = str(free_port())
    shared = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    nodes = [
        torchrun(script, *shared, "--master-port", port, "--node-rank", str(n)) for n in range(2)
    ]
    outs = [node.communicate(timeout=180)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    total = [6.0, 6.0]
    assert f"RESULT {[(r, total) for r in range(4)]}" in outs[0]
    assert "RESULT" not in outs[1]
