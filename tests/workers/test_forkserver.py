"""What the server imports for its ranks, and when; no test here leaves it an idle moment."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from playbook_utils.errors import LaunchError
from playbook_utils.workers import launch, shutdown
from playbook_utils.workers.forkserver import SLOW_IMPORTS


@pytest.fixture(autouse=True)
def new_server() -> Iterator[None]:
    shutdown()
    yield
    shutdown()


def look() -> tuple[list[str], bool, int]:
    """The slow imports and CUDA, where they are there at the start; the threads of the server."""
    threads = list(Path(f"/proc/{os.getppid()}/task").iterdir())
    return [m for m in SLOW_IMPORTS if m in sys.modules], torch.cuda.is_initialized(), len(threads)


def test_what_the_ranks_of_one_launch_imported_those_of_the_next_have() -> None:
    def fail(modules: list[str]) -> None:
        for module in modules:  # by a name that tells nothing before the launch
            importlib.import_module(module)
        os._exit(3)

    assert launch(look, world_size=1) == [([], False, 1)]
    for modules in (["torch._dynamo"], list(SLOW_IMPORTS)):
        with pytest.raises(LaunchError, match="code 3"):
            launch(fail, modules, world_size=2)
        assert launch(look, world_size=2) == [(modules, False, 1)] * 2


def test_a_function_that_names_an_optimizer_finds_its_imports_done() -> None:
    def train() -> list[str]:
        found, *_ = look()
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
        return found

    assert launch(train, world_size=2) == [["torch._dynamo"]] * 2
