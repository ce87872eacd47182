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


def look() -> tuple[bool, bool, int]:
    """Whether torch._dynamo and CUDA are there at the start, and the threads of the server."""
    threads = list(Path(f"/proc/{os.getppid()}/task").iterdir())
    return "torch._dynamo" in sys.modules, torch.cuda.is_initialized(), len(threads)


def test_what_the_ranks_of_one_launch_imported_those_of_the_next_have() -> None:
    def fail() -> None:
        for module in SLOW_IMPORTS:  # by a name that tells nothing before the launch
            importlib.import_module(module)
        os._exit(3)

    assert launch(look, world_size=1) == [(False, False, 1)]
    with pytest.raises(LaunchError, match="code 3"):
        launch(fail, world_size=2)
    assert launch(look, world_size=2) == [(True, False, 1)] * 2


def test_a_function_that_names_an_optimizer_finds_its_imports_done() -> None:
    def train() -> bool:
        found, *_ = look()
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
        return found

    assert launch(train, world_size=2) == [True, True]
