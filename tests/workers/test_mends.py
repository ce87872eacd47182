"""What a rank does better than a plain process: keyboards, absent peers, spawned children."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from playbook_utils.errors import LaunchError
from playbook_utils.workers import launch


def ask_debugger() -> None:
    import pdb

    pdb.set_trace()
    print("not reached")


def ask_input() -> str:
    return input("learning rate: ")


def ask_breakpoint() -> None:
    breakpoint()


@pytest.mark.parametrize(
    "ask", [ask_debugger, ask_input, ask_breakpoint, lambda: sys.stdin.read(1)]
)
def test_a_rank_without_a_keyboard_says_so(ask: Callable[[], object]) -> None:
    with pytest.raises(LaunchError, match="a rank has no keyboard") as caught:
        launch(ask, world_size=1, timeout_s=20)
    assert "workers/mends.py" not in str(caught.value)


def ask_nobody() -> dict[tuple[str, int], str]:
    """What each way to name a peer says, to the ranks of a pair among four ranks."""
    pair = dist.new_group([2, 3])
    if dist.get_rank() < 2:
        return {}
    tensor = torch.ones(3)
    calls: dict[str, Callable[[int], object]] = {
        "isend": lambda peer: dist.isend(tensor, dst=peer),
        "irecv": lambda peer: dist.irecv(tensor, src=peer),
        "P2POp": lambda peer: dist.P2POp(dist.isend, tensor, peer),
        "send in pair": lambda peer: dist.send(tensor, group=pair, group_dst=peer),
        "recv in pair": lambda peer: dist.recv(tensor, group=pair, group_src=peer),
        "broadcast in pair": lambda peer: dist.broadcast(tensor, group=pair, group_src=peer),
    }
    said = {}
    for how, call in calls.items():
        for peer in (2 if "pair" in how else 4, -1, -3):
            with pytest.raises(ValueError) as caught:
                call(peer)
            said[how, peer] = str(caught.value)
    return said


def test_a_peer_that_does_not_exist_is_an_error_and_no_wait_for_ever() -> None:
    *_, said = launch(ask_nobody, world_size=4, timeout_s=30)
    assert len(said) == 18
    for (how, peer), text in said.items():
        last = 1 if "pair" in how else 3
        assert text == f"found peer {peer}, expected a rank of this group, 0 to {last}", how


def test_a_present_peer_of_a_subgroup_is_reached() -> None:
    def work() -> float:
        pair = dist.new_group([1, 2])
        box = torch.zeros(1)
        if dist.get_rank() == 1:
            dist.send(torch.full((1,), 7.0), dst=2, group=pair)
        elif dist.get_rank() == 2:
            calls = [dist.P2POp(dist.irecv, box, group=pair, group_peer=0)]
            for request in dist.batch_isend_irecv(calls):
                request.wait()
        return box.item()

    assert launch(work, world_size=3) == [0.0, 0.0, 7.0]


def test_a_spawned_data_loader_reads_a_dataset_of_the_notebook() -> None:
    @dataclass
    class Batch:
        numbers: torch.Tensor
        pid: int

    class Numbers(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return index

    for cls in (Batch, Numbers):  # as if a cell had defined them
        cls.__module__, cls.__qualname__ = "__main__", cls.__name__

    def work() -> list[float]:
        loader = torch.utils.data.DataLoader(
            Numbers(),
            batch_size=2,
            num_workers=1,
            multiprocessing_context="spawn",
            collate_fn=lambda items: Batch(torch.tensor(items), os.getpid()),
        )
        batches = list(loader)
        assert all(batch.pid != os.getpid() for batch in batches)
        return [batch.numbers.sum().item() for batch in batches]

    assert launch(work, world_size=1) == [[1, 5]]
