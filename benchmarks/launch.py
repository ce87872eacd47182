"""What starting ranks from a notebook costs: `launch` beside its peers, in one run (`make bench`).

The same function (initialise gloo, one all-reduce) is started by `launch`, by
`torch.multiprocessing.spawn`, by `accelerate.notebook_launcher` and by `torchrun`, in turns, so
that a busy machine is busy for all of them. Times are medians and depend on the machine; what
counts are the ratios, each beside what it has to reach: about half of what a quiet machine does.
Exits 1 where one is missed, and says how busy other work kept the machine. About two minutes.

    python benchmarks/launch.py [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from playbook_utils.workers import launch, shutdown

WORLD_SIZE = 4
HANG_S = 40
SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


def one_all_reduce() -> None:
    """The work of every contestant; `launch` has initialised the group before."""
    dist.all_reduce(torch.ones(1))


def initialise_and_reduce(rank: int, path: str, world_size: int) -> None:
    """The same for a contestant that leaves the group to its function."""
    store = dist.FileStore(path, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    one_all_reduce()
    dist.barrier()  # gloo aborts in some teardowns that peers are not ready for
    dist.destroy_process_group()


def in_notebook_launcher() -> None:
    """The same where the launcher has set torchrun's variables."""
    dist.init_process_group("gloo")
    one_all_reduce()


def by_launch() -> None:
    launch(one_all_reduce, world_size=WORLD_SIZE)


def by_spawn() -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = (os.path.join(folder, "rendezvous"), WORLD_SIZE)
        mp.spawn(initialise_and_reduce, args=arguments, nprocs=WORLD_SIZE)


def by_torchrun() -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(SCRIPT)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(WORLD_SIZE), str(script)]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=120)


def by_notebook_launcher() -> None:
    notebook_launcher = importlib.import_module("accelerate").notebook_launcher
    with socket.socket() as sock:  # its fixed default port is taken by whoever used it before
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        notebook_launcher(in_notebook_launcher, num_processes=WORLD_SIZE, use_port=port)


def seconds(call: Callable[[], object]) -> float:
    """How long one call takes; HANG_S where it hangs, as notebook_launcher sometimes does."""
    signal.signal(signal.SIGALRM, _hung)
    signal.alarm(HANG_S)
    started = time.perf_counter()
    try:
        call()
    except TimeoutError:
        print(f"{call.__name__} hung, stopped after {HANG_S} s", file=sys.stderr)
        for child in psutil.Process().children():
            if "forkserver" not in " ".join(child.cmdline()):
                child.kill()
    finally:
        signal.alarm(0)
    return time.perf_counter() - started


def _hung(*_: object) -> None:
    raise TimeoutError


def cold_over_import(repeats: int) -> float:
    """Median of (a first launch, server start included) / (python -c "import torch")."""
    ratios = []
    for _ in range(repeats):
        bare = seconds(lambda: subprocess.run([sys.executable, "-c", "import torch"], check=True))
        shutdown()
        ratios.append(seconds(by_launch) / bare)
    return statistics.median(ratios)


def memory_per_worker() -> float:
    """Mean PSS of 8 workers in MB, after an all-reduce."""

    def pss() -> float:
        one_all_reduce()
        # Read plainly: importing psutil here would cost each worker 4 MB of its own.
        with open("/proc/self/smaps_rollup") as lines:
            (kib,) = [int(line.split()[1]) for line in lines if line.startswith("Pss:")]
        dist.barrier()  # all are there while each is measured
        return kib * 1024 / 1e6

    return statistics.mean(launch(pss, world_size=8))


def busy() -> str:
    """How much of the machine others take, while nothing of ours runs."""
    percent = psutil.cpu_percent(interval=2)
    return f"{percent:.0f} % of {os.cpu_count()} cores busy, load {os.getloadavg()[0]:.1f}"


def report(name: str, value: float, limit: float, *, at_least: bool, unit: str = "") -> bool:
    reached = value >= limit if at_least else value <= limit
    goal = f"{'at least' if at_least else 'at most'} {limit:g}{unit}"
    print(f"{name:<58} {value:8.2f}{unit:<3} {goal:<18} {'reached' if reached else 'MISSED'}")
    return reached


def timed(turns: int) -> tuple[dict[str, float], list[float]]:
    """Median seconds of each way to start 4 ranks; those of each launch of 8 ranks."""
    peers = {
        "torch.multiprocessing.spawn": by_spawn,
        "torchrun": by_torchrun,
        "accelerate.notebook_launcher": by_notebook_launcher,
    }
    times: dict[str, list[float]] = {name: [] for name in ("launch", *peers)}
    eight = []
    for turn in range(turns):
        for name, call in peers.items():
            times["launch"] += [seconds(by_launch) for _ in range(3)]
            eight += [seconds(lambda: launch(one_all_reduce, world_size=8)) for _ in range(4)]
            times[name].append(seconds(call))
        print(f"turn {turn + 1} of {turns} done", file=sys.stderr)
    return {name: statistics.median(found) for name, found in times.items()}, eight


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repeats, for a first look")
    quick = parser.parse_args().quick
    warnings.simplefilter("ignore")
    before = busy()
    cold = cold_over_import(1 if quick else 3)
    time.sleep(8)  # the server has imported by now what it imports while idle
    median, eight = timed(1 if quick else 4)
    for name, value in median.items():
        print(f"{name:<58} {value:8.3f} s a warm call, {WORLD_SIZE} ranks")
    tenth = statistics.quantiles(eight, n=10)[-1] / statistics.median(eight)
    spawn, torchrun, notebook_launcher = (
        median[name] / median["launch"] for name in list(median)[1:]
    )
    results = [
        report("mp.spawn / launch", spawn, 15, at_least=True),
        report("torchrun / launch", torchrun, 25, at_least=True),
        report("notebook_launcher / launch", notebook_launcher, 1, at_least=True),
        report("cold launch / import torch", cold, 2, at_least=False),
        report(f"slowest tenth / median of {len(eight)} calls, 8 ranks", tenth, 3, at_least=False),
        report("memory of a worker, PSS", memory_per_worker(), 35, at_least=False, unit=" MB"),
    ]
    shutdown()
    print(f"other work before: {before}; after: {busy()}")
    if not all(results):
        print("Where others kept the machine busy, run it again on a quiet one.")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
