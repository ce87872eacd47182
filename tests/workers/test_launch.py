"""What a launch gives back, in this process: results, arguments, output, bad arguments."""

from __future__ import annotations

import atexit
import collections
import functools
import logging
import os
import random
import string
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import torch
import torch.distributed as dist

from playbook_utils.errors import LaunchError, NestedLaunchError
from playbook_utils.workers import device, launch, prewarm, shutdown
from playbook_utils.workers.servers import ForkServer


def rank_squared(add: int = 0) -> int:
    return dist.get_rank() ** 2 + add


def summed(value: torch.Tensor) -> torch.Tensor:
    total = value * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return total


@dataclass
class Box:
    value: torch.Tensor


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_results_come_in_rank_order(world_size: int) -> None:
    assert launch(rank_squared, 1, world_size=world_size) == [r**2 + 1 for r in range(world_size)]


@dataclass
class Look:
    """What a rank saw of the 200 MB that it was sent."""

    total: float
    own_kib: int
    """Memory that the rank has for itself after it has read them."""
    first: list[float]
    """Of each part, after the rank has changed it."""
    summed: torch.Tensor


def look(sent: list[Any]) -> Look:
    total = sum(float(x.sum()) for x in sent)
    dist.barrier()  # pages that no other rank has read yet would count as this rank's own
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (own,) = [int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:")]
    for x in sent:
        x[0] += 1 + dist.get_rank()
    dist.barrier()
    return Look(total, own, [float(x[0]) for x in sent], summed(torch.arange(3.0)))


@pytest.fixture(scope="module", params=["fork", "spawn"])
def looks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[Any], list[Look]]:
    """(start method, what was sent, results) of one launch, whose sys.path has a path object."""
    sent = [torch.ones(40_000_000), numpy.ones(5_000_000)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.path", [*sys.path, tmp_path_factory.mktemp("a path object")])
        shutdown()
        return request.param, sent, launch(look, sent, world_size=2, start_method=request.param)


def test_collectives_work(looks: tuple[str, list[Any], list[Look]]) -> None:
    """And a path object in sys.path is no hindrance."""
    _, _, results = looks
    assert all(torch.equal(r.summed, 3 * torch.arange(3.0)) for r in results)


def test_ranks_share_the_pages_of_what_they_are_sent(
    looks: tuple[str, list[Any], list[Look]],
) -> None:
    start_method, sent, results = looks
    assert [(r.total, r.first) for r in results] == [(45e6, [2, 2]), (45e6, [3, 3])]
    # A spawned rank has 150 MB of its own before it is sent anything, a forked one 20.
    limit_kib = {"fork": 100_000, "spawn": 250_000}[start_method]
    assert all(r.own_kib < limit_kib for r in results), [r.own_kib for r in results]
    assert sent[0][0] == 1 and sent[1][0] == 1


def test_closures_partials_lambdas_and_dataclasses() -> None:
    offset = 7
    assert launch(lambda: dist.get_rank() + offset, world_size=2) == [7, 8]
    assert launch(functools.partial(rank_squared, add=2), world_size=2) == [2, 3]
    (box,) = launch(lambda b: Box(b.value + 1), Box(torch.ones(2)), world_size=1)
    assert isinstance(box, Box) and torch.equal(box.value, torch.full((2,), 2.0))


def test_a_module_comes_back_with_its_gradients_and_its_ties() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(5, 3)
            self.head = torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight

    def train() -> torch.nn.Module:
        model = Tied()
        model.head(model.embedding(torch.tensor([1, 2]))).sum().backward()
        return model

    model = launch(train, world_size=1)[0]
    assert isinstance(model, Tied)
    assert model.head.weight is model.embedding.weight
    assert isinstance(model.head.weight, torch.nn.Parameter) and model.head.weight.requires_grad
    assert model.head.weight.grad is not None and model.head.weight.grad.abs().sum() > 0


def test_200_megabytes_come_back() -> None:
    (tensor,) = launch(lambda: torch.arange(50_000_000, dtype=torch.float32), world_size=1)
    assert tensor.nbytes == 200_000_000 and tensor[-1] == 49_999_999


def test_launches_in_a_row_leave_no_descriptor() -> None:
    launch(rank_squared, world_size=2)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        assert launch(rank_squared, world_size=2) == [0, 1]
    assert len(os.listdir("/proc/self/fd")) == before


def test_launches_from_several_threads_wait_for_each_other() -> None:
    results: dict[int, list[int]] = {}
    threads = [
        threading.Thread(
            target=lambda i=i: results.update({i: launch(rank_squared, i, world_size=2)})
        )
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: [i, i + 1] for i in range(4)}


def test_data_loader_workers_inside_a_rank() -> None:
    def total() -> float:
        data = torch.utils.data.TensorDataset(torch.arange(10.0))
        loader = torch.utils.data.DataLoader(data, batch_size=3, num_workers=2)
        return sum(float(batch.sum()) for (batch,) in loader)

    assert launch(total, world_size=2) == [45.0, 45.0]


def test_ranks_draw_different_numpy_and_python_numbers_and_equal_torch_ones() -> None:
    def draw() -> tuple[float, float, float]:
        return numpy.random.rand(), random.random(), float(torch.rand(()))

    first, second = launch(draw, world_size=2)
    assert first[0] != second[0] and first[1] != second[1] and first[2] == second[2]


def test_environment_folder_and_threads(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("LESSON", "six")
    monkeypatch.chdir(tmp_path)

    def look() -> tuple[str, str, int, str, str]:
        names = ("LESSON", "RANK", "WORLD_SIZE")
        lesson, rank, world = (os.environ[name] for name in names)
        return lesson, os.getcwd(), torch.get_num_threads(), rank, world

    assert launch(look, world_size=2, threads=1) == [
        ("six", str(tmp_path), 1, str(rank), "2") for rank in range(2)
    ]
    cores = len(os.sched_getaffinity(0))
    assert launch(torch.get_num_threads, world_size=1) == [cores]
    assert launch(torch.get_num_threads, world_size=8) == [max(1, cores // 8)] * 8


def test_dtype_precision_and_determinism_of_the_notebook_are_the_ranks() -> None:
    def look() -> tuple[torch.dtype, str, bool, bool]:
        return (
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )

    before = look()
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("medium")
        torch.set_deterministic_debug_mode("warn")  # the same, without importing Inductor
        assert launch(look, world_size=1) == [(torch.float64, "medium", True, True)]
    finally:
        torch.set_default_dtype(before[0])
        torch.set_float32_matmul_precision(before[1])
        torch.set_deterministic_debug_mode("default")
    assert launch(look, world_size=1) == [before]


def test_what_does_not_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the docstring of `launch` says."""
    ran = []
    atexit.register(ran.append, 1)
    monkeypatch.setattr(string, "digits", "changed")
    logger = logging.getLogger("lesson")
    logger.setLevel(logging.DEBUG)
    inner = torch.ones(1, requires_grad=True) * 2
    inner.retain_grad()
    inner.backward()
    torch.set_printoptions(precision=2)
    try:
        sent = [inner]

        two = torch.zeros(2)
        shared = [two, two[:1]]

        def look() -> tuple[object, ...]:
            text = str(torch.tensor(1 / 3)) + str(numpy.array(1 / 3))
            shared[0].fill_(1)
            now = shared[1].item(), torch.is_grad_enabled(), torch.initial_seed() == 1234
            return string.digits, logging.getLogger("lesson").level, sent[0].grad, text, *now

        before = "0123456789", logging.NOTSET, None, "tensor(0.3333)0.3333333333333333"
        with numpy.printoptions(precision=2), torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(1234)
            assert launch(look, world_size=1) == [(*before, 0.0, True, False)]
    finally:
        torch.set_printoptions(profile="default")
        atexit.unregister(ran.append)


def test_the_debug_level_set_in_the_notebook_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert launch(lambda: str(dist.get_debug_level()), world_size=1) == ["DebugLevel.DETAIL"]


def test_device_is_the_cpu_under_gloo() -> None:
    assert launch(device, world_size=1, backend="gloo") == [torch.device("cpu")]


def test_output_is_labelled_and_in_rank_order(capfd: pytest.CaptureFixture[str]) -> None:
    def talk() -> None:
        for i in range(2):
            print("line", i)
        os.write(1, b"from C\n")
        print("partial", end="")

    launch(talk, world_size=2)
    lines = ["line 0", "line 1", "from C", "partial"]
    expected = [f"[rank {rank}] {line}" for rank in range(2) for line in lines]
    assert capfd.readouterr().out.splitlines() == expected


def test_the_server_has_one_thread_and_no_cuda() -> None:
    server = ForkServer()
    assert server.threads() == 1
    server.close()
    assert launch(torch.cuda.is_initialized, world_size=1) == [False]


def test_shutdown_and_prewarm_can_be_repeated_and_several_threads_get_one_server() -> None:
    shutdown()
    shutdown()
    threads = [threading.Thread(target=prewarm) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    prewarm()
    assert len(psutil.Process().children()) == 1
    assert launch(rank_squared, world_size=2) == [0, 1]


def test_a_launch_inside_a_launch_is_refused() -> None:
    with pytest.raises(LaunchError, match="notebook only") as caught:
        launch(lambda: launch(rank_squared, world_size=2), world_size=2)
    assert isinstance(caught.value.__cause__, NestedLaunchError)
    assert [f.rank for f in caught.value.failures] == [0, 1]


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"world_size": 0}, ValueError, "found 0"),
        ({"world_size": -1}, ValueError, "found -1"),
        ({"world_size": 1000}, ValueError, "1 to 64 .* found 1000"),
        ({"world_size": "4"}, TypeError, "int, found '4'"),
        ({"world_size": True}, TypeError, "int, found True"),
        ({"world_size": 2, "backend": "mpi"}, ValueError, '"gloo", "nccl"'),
        ({"world_size": 2, "timeout_s": 0}, ValueError, "more than 0"),
        ({"world_size": 2, "timeout_s": "5"}, ValueError, "timeout_s must be seconds"),
        ({"world_size": 2, "timeout_s": None}, ValueError, "timeout_s must be seconds"),
        (
            {"world_size": 2, "collective_timeout_s": float("inf")},
            ValueError,
            "collective_timeout_s must be seconds",
        ),
        ({"world_size": 2, "order": "random"}, ValueError, '"rank" or "arrival"'),
        ({"world_size": 2, "threads": 0}, ValueError, "positive int"),
        ({"world_size": 2, "start_method": "forkserver"}, ValueError, '"fork", "spawn"'),
        ({"world_size": numpy.bool_(True)}, TypeError, "int, found np.True_"),
        ({"world_size": 2.0}, TypeError, "int, found 2.0"),
        ({"world_size": 2, "threads": True}, ValueError, "positive int"),
        ({"world_size": "4" * 10_000}, TypeError, r"^.{1,100}$"),
        (
            {"world_size": 2, "lr": 0.1},
            TypeError,
            r"no argument 'lr'.* launch\(functools.partial\(rank_squared, lr=...\), ...\)$",
        ),
    ],
)
def test_bad_arguments(kwargs: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        launch(rank_squared, **kwargs)


@pytest.mark.parametrize("kind", [numpy.int64, numpy.uint8, torch.tensor])
def test_counts_of_numpy_and_torch_are_counts(kind: Callable[[int], Any]) -> None:
    found = launch(torch.get_num_threads, world_size=kind(2), threads=kind(1))
    assert found == [1, 1]
    seconds = numpy.float32(30)
    assert launch(rank_squared, world_size=1, timeout_s=seconds, collective_timeout_s=seconds) == [
        0
    ]


def test_nccl_without_gpus_is_refused() -> None:
    if torch.cuda.device_count() >= 64:
        pytest.skip("this machine has 64 GPUs")
    with pytest.raises(ValueError, match="needs a GPU for each of 64 ranks"):
        launch(rank_squared, world_size=64, backend="nccl")


def test_a_call_in_place_of_a_function_is_refused() -> None:
    with pytest.raises(TypeError, match="without calling it"):
        launch(3, world_size=2)  # type: ignore[arg-type]


def test_what_cannot_be_sent_or_sent_back_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"variable `lock` around <lambda> holds a lock, .* inside"):
        launch(lambda: lock, world_size=1)
    with pytest.raises(LaunchError, match=r"holds a lock in `\['a'\]\[1\]`, .* sent back"):
        launch(lambda: {"a": (1, threading.Lock())}, world_size=1)


def test_a_counter_is_the_workers_own() -> None:
    calls: collections.Counter[str] = collections.Counter()

    def count() -> int:
        calls["x"] += 1
        return calls["x"]

    assert launch(count, world_size=2) == [1, 1]
    assert calls["x"] == 0
