"""A real Jupyter kernel to drive, and a look at what a launch leaves behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from jupyter_client import BlockingKernelClient, KernelManager


class Kernel:
    """One ipykernel process."""

    def __init__(self) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel()
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.number = 0
        """Of the last cell that was run."""
        self.running = ""

    @property
    def pid(self) -> int:
        return self.manager.provisioner.pid

    def start(self, code: str) -> str:
        self.running = self.client.execute(code)
        return self.running

    def run(self, code: str, timeout_s: float = 90) -> str:
        """Run a cell; its printed text, the repr of its value, or its error's text."""
        return self.wait(self.start(code), timeout_s)

    def wait(self, request: str, timeout_s: float = 90) -> str:
        text = []
        deadline = time.monotonic() + timeout_s
        while True:
            message = self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if message["msg_type"] == "execute_input":
                self.number = content["execution_count"]
            elif message["msg_type"] == "stream":
                text.append(content["text"])
            elif message["msg_type"] == "execute_result":
                text.append(content["data"]["text/plain"])
            elif message["msg_type"] == "error":
                text.append("\n".join(content["traceback"]))
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                self.running = ""
                return "".join(text)

    def interrupt(self) -> str:
        """End the running cell; its text."""
        self.manager.interrupt_kernel()
        return self.wait(self.running, timeout_s=10)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)

    def wait_for_workers(self, number: int, timeout_s: float = 30) -> list[psutil.Process]:
        """The server and at least `number` workers below it."""
        deadline = time.monotonic() + timeout_s
        while len(found := self.descendants()) < number + 1:
            assert time.monotonic() < deadline, f"only {found}"
            time.sleep(0.05)
        return found

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self.client.stop_channels()
        if self.manager.is_alive():
            self.manager.shutdown_kernel(now=True)
        else:
            self.manager.cleanup_resources()


IMPORTS = """
import os, time
from dataclasses import dataclass
import torch, torch.distributed as dist
from playbook_utils.workers import launch, shutdown
"""


@pytest.fixture(scope="module")
def module_kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    kernel.run(IMPORTS)
    yield kernel
    kernel.close()


@pytest.fixture
def kernel(module_kernel: Kernel) -> Iterator[Kernel]:
    """The module's one kernel, where IMPORTS has run; no test leaves a cell running."""
    yield module_kernel
    if module_kernel.running:
        module_kernel.interrupt()


@pytest.fixture
def new_kernel() -> Iterator[Kernel]:
    """A kernel of the test's own, to be ended or to be looked at as it starts."""
    kernel = Kernel()
    yield kernel
    kernel.close()


def gone_within(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """The processes that still run after `seconds`; a zombie no longer runs."""
    deadline = time.monotonic() + seconds
    while (left := [p for p in processes if _runs(p)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shared_files() -> set[str]:
    """What is in shared memory and, of the launcher's, in the temporary folder."""
    folders = [Path("/dev/shm"), Path(os.environ.get("TMPDIR", "/tmp"))]
    found = {str(p) for p in folders[0].iterdir()} if folders[0].is_dir() else set()
    return found | {str(p) for p in folders[1].glob("playbook-launch-*")}


def files_left(before: set[str], seconds: float = 3.0) -> set[str]:
    """Shared files that are new and stay: those of tests that run beside this one come and go."""
    deadline = time.monotonic() + seconds
    left = shared_files() - before
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left &= shared_files()
    return left
