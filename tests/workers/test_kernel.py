"""Launches from cells of a real kernel: what cells define, interrupts, and a kernel's death."""

from __future__ import annotations

import os
import time

import pytest

from tests.workers.conftest import IMPORTS, Kernel, files_left, gone_within, shared_files


def test_what_cells_define_travels_both_ways(kernel: Kernel) -> None:
    kernel.run(
        "offset = 10\n"
        "class Counter:\n    made = 0\n"
        "@dataclass\nclass Pair:\n    rank: int\n    value: torch.Tensor\n"
        "class Scale(torch.nn.Module):\n"
        "    def __init__(self, by):\n        super().__init__()\n"
        "        self.by = torch.nn.Parameter(torch.tensor(by))\n"
        "    def forward(self, x):\n        return self.by * x\n"
    )
    kernel.run("Counter.made = 7")
    kernel.run(
        "def work(scale):\n"
        "    Counter.made += 1\n"
        "    pairs = [None] * dist.get_world_size()\n"
        "    dist.all_gather_object(pairs, Pair(dist.get_rank(), torch.ones(2)))\n"
        "    return Counter(), pairs, scale, scale(torch.tensor(2.0)).item() + offset\n"
    )
    kernel.run("results = launch(work, Scale(3.0), world_size=3)")
    assert kernel.run("[r[3] for r in results]") == "[16.0, 16.0, 16.0]"
    assert kernel.run("all(isinstance(r[0], Counter) for r in results)") == "True"
    assert kernel.run("[(type(p) is Pair, p.rank) for p in results[2][1]]") == (
        "[(True, 0), (True, 1), (True, 2)]"
    )
    assert kernel.run("isinstance(results[1][2], Scale), results[1][2].by.item()") == "(True, 3.0)"
    assert kernel.run("Counter.made") == "7", "a class of the notebook was overwritten"


def test_an_error_shows_the_cell_and_its_lines(kernel: Kernel) -> None:
    kernel.run("def inner():\n    raise ValueError('from the cell')")
    inner, outer = kernel.number, kernel.number + 1
    kernel.run("def work():\n    if dist.get_rank() == 1:\n        inner()\n    dist.barrier()")
    text = kernel.run("launch(work, world_size=3)")
    assert text.startswith("LaunchError: rank 1 of 3 failed")
    assert f"Cell In[{outer}], line 3, in work\n    inner()" in text
    assert f"Cell In[{inner}], line 2, in inner\n    raise ValueError('from the cell')" in text
    assert f"ranks 0, 2: barrier (Cell In[{outer}], line 4)" in text
    assert "site-packages" not in text and "playbook_utils" not in text


def test_a_deadlock_names_the_cells_lines(kernel: Kernel) -> None:
    kernel.run(
        "def work():\n    x = torch.ones(1)\n    if dist.get_rank() == 1:\n"
        "        dist.recv(x, 0)\n    dist.all_reduce(x)"
    )
    cell = kernel.number
    text = kernel.run("launch(work, world_size=3, timeout_s=2)")
    assert text.startswith("LaunchTimeout: ")
    assert f"ranks 0, 2: all_reduce (Cell In[{cell}], line 5)" in text
    assert f"rank 1: recv (Cell In[{cell}], line 4)" in text


def test_source_of_a_cell_is_known_in_the_worker(kernel: Kernel) -> None:
    kernel.run("import inspect")
    kernel.run("def work():\n    return inspect.getsource(work)  # here")
    assert "# here" in kernel.run("print(launch(work, world_size=1)[0])")


@pytest.mark.parametrize("body", ["time.sleep(60)", "dist.barrier() if rank else time.sleep(60)"])
def test_an_interrupt_ends_all_ranks(kernel: Kernel, body: str) -> None:
    before = shared_files()
    kernel.start(f"def work():\n    rank = dist.get_rank()\n    {body}\nlaunch(work, world_size=3)")
    server, *workers = kernel.wait_for_workers(3)
    time.sleep(0.3)
    text = kernel.interrupt()
    assert "LaunchInterrupted: interrupted; all 3 ranks were stopped" in text
    assert gone_within(workers, 1) == []
    assert server.is_running() and files_left(before) == set()
    assert kernel.run("launch(dist.get_rank, world_size=2)") == "[0, 1]"


@pytest.mark.parametrize("end", ["kill", "shutdown"])
def test_a_kernel_that_ends_leaves_nothing(new_kernel: Kernel, end: str) -> None:
    before = shared_files()
    new_kernel.run(IMPORTS)
    new_kernel.start(
        "def work():\n"
        "    data = torch.utils.data.TensorDataset(torch.ones(8))\n"
        "    loader = torch.utils.data.DataLoader(data, num_workers=1)\n"
        "    for batch in loader:\n        time.sleep(60)\n"
        "launch(work, world_size=2)"
    )
    processes = new_kernel.wait_for_workers(4)
    assert len(processes) >= 5, "server, two ranks, two data loader workers"
    if end == "kill":
        new_kernel.kill()
    else:
        new_kernel.manager.shutdown_kernel(now=True)
    assert gone_within(processes, 3) == []
    assert files_left(before) == set()


def test_a_kernel_killed_while_the_server_still_imports_leaves_nothing(
    new_kernel: Kernel,
) -> None:
    new_kernel.run("from playbook_utils.workers import prewarm; prewarm()")
    processes = new_kernel.wait_for_workers(0)
    new_kernel.kill()
    assert gone_within(processes, 3) == []


def test_nothing_listens_on_other_than_loopback(kernel: Kernel) -> None:
    kernel.start("def work():\n    dist.barrier()\n    time.sleep(60)\nlaunch(work, world_size=3)")
    _, *workers = kernel.wait_for_workers(3)
    time.sleep(0.5)
    addresses = {c.laddr.ip for p in workers for c in p.net_connections() if c.laddr}
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_two_kernels_launch_at_the_same_time(kernel: Kernel, new_kernel: Kernel) -> None:
    """The first launch of both, so that their servers start at the same time, too."""
    new_kernel.run(IMPORTS)
    kernel.run("shutdown()")
    for one in (kernel, new_kernel):
        one.run("def work():\n    x = torch.ones(1)\n    dist.all_reduce(x)\n    return x.item()")
    for one in (kernel, new_kernel):
        one.start("[launch(work, world_size=3) for _ in range(5)][-1]")
    found = [one.wait(one.running) for one in (kernel, new_kernel)]
    assert found == ["[3.0, 3.0, 3.0]"] * 2


def test_stored_output_is_the_same_on_every_run(kernel: Kernel) -> None:
    kernel.run(
        "def work():\n    for i in range(3):\n        print('step', i)\n        dist.barrier()"
    )
    texts = {kernel.run("launch(work, world_size=4);") for _ in range(5)}
    assert texts == {"".join(f"[rank {r}] step {i}\n" for r in range(4) for i in range(3))}


def test_output_of_rank_0_is_live(kernel: Kernel) -> None:
    kernel.start("def work():\n    print('early')\n    time.sleep(60)\nlaunch(work, world_size=2)")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        message = kernel.client.get_iopub_msg(timeout=30)
        if message["msg_type"] == "stream":
            break
    assert message["content"]["text"].startswith("[rank 0] early")
    assert "[rank 1] early" in kernel.interrupt()


def test_a_launch_works_after_threaded_work_in_the_kernel(kernel: Kernel) -> None:
    """Forking the kernel itself hangs here: OpenMP's threads do not survive a fork."""
    kernel.run("shutdown()")
    kernel.run("torch.set_num_threads(2); a = torch.ones(600, 600); b = a @ a")
    assert kernel.run("launch(lambda: (a @ a)[0, 0].item(), world_size=2)") == "[600.0, 600.0]"


def test_the_kernels_own_files_are_not_inherited(kernel: Kernel) -> None:
    kernel.run("shutdown(); secret = open(os.devnull)")
    code = "launch(lambda: [os.readlink(f'/proc/self/fd/{f}') for f in os.listdir('/proc/self/fd')"
    code += " if os.path.exists(f'/proc/self/fd/{f}')], world_size=1)[0]"
    held = eval(kernel.run(code))
    kernel.run("secret.close()")
    assert os.devnull in held, "standard input"
    assert sum(name == os.devnull for name in held) == 1


REFUSED = [
    # a cell before, the launch, how its text begins
    (
        'logf = open(os.devnull, "w")\ndef work():\n    logf.write("x")',
        "launch(work, world_size=2)",
        "TypeError: global `logf` of work holds an open file, which cannot be sent to workers",
    ),
    ("", "launch(print, world_size=0)", "ValueError: world_size must be 1 or more processes"),
    (
        "",
        "launch(print, 1, world_size=2, sep=' ')",
        "TypeError: launch() has no argument 'sep'",
    ),
    (
        "import tempfile\nhere = os.getcwd()\ngone = tempfile.mkdtemp()\n"
        "os.chdir(gone); os.rmdir(gone)",
        "launch(dist.get_rank, world_size=2)",
        "PlaybookError: the folder that this notebook runs in was deleted",
    ),
    (
        "os.chdir(here)\nimport resource\n"
        "limits = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "held = len(os.listdir('/proc/self/fd'))\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (held + 8, limits[1]))",
        "launch(dist.get_rank, world_size=8)",
        "PlaybookError: this process may open no more files",
    ),
    (
        "resource.setrlimit(resource.RLIMIT_NOFILE, limits)\n"
        "def work():\n    os.kill(os.getppid(), 9)\n    time.sleep(60)",
        "launch(work, world_size=2)",
        "PlaybookError: the process that workers are forked from",
    ),
    (
        "def work():\n    return work()",
        "launch(work, world_size=2)",
        "LaunchError: all 2 ranks failed\nranks 0, 1: RecursionError",
    ),
    (
        "def work():\n    raise ValueError('x' * 5_000_000)",
        "launch(work, world_size=2)",
        "LaunchError: all 2 ranks failed\nranks 0, 1: ValueError: xxx",
    ),
    (
        "class Slow:\n    def __reduce__(self):\n        return time.sleep, (60,)",
        "launch(print, Slow(), world_size=2, timeout_s=1)",
        "LaunchTimeout: all 2 ranks did not finish within 1 s\n"
        "  ranks 0, 1: still receiving the function and its arguments",
    ),
]


def test_every_text_is_short_and_shows_no_frame_of_ours(kernel: Kernel) -> None:
    """And the next launch works, once the cause is gone."""
    for before, cell, begin in REFUSED:
        assert kernel.run(before) == ""
        text = kernel.run(cell)
        assert text.startswith(begin), text
        assert len(text) < 6000 and len(text.splitlines()) < 12, cell
        assert "playbook_utils" not in text and "workers/" not in text, text
    kernel.run("import psutil\nfor child in psutil.Process().children():\n    child.kill()")
    text = kernel.run("launch(dist.get_rank, world_size=2)")
    assert text == "[0, 1]" or text.startswith("PlaybookError: the process that"), text
    assert kernel.run("launch(dist.get_rank, world_size=2)") == "[0, 1]"
    assert len(kernel.descendants()) == 1, "the server alone"


def test_an_interrupt_of_the_start_is_one_sentence(kernel: Kernel) -> None:
    kernel.run("shutdown()\nclass Slow:\n    def __reduce__(self):\n        time.sleep(60)")
    kernel.start("print('starts', flush=True)\nlaunch(print, Slow(), world_size=2)")
    kernel.wait_for_workers(0)
    time.sleep(0.5)
    text = kernel.interrupt()
    assert text == "starts\nLaunchInterrupted: interrupted; all 2 ranks were stopped"
    assert kernel.run("launch(dist.get_rank, world_size=2)") == "[0, 1]"


def test_names_of_a_notebook_that_the_workers_own_start_has_are_the_notebooks(
    kernel: Kernel,
) -> None:
    kernel.run(
        "def kernel(x):\n    return x + 1\n"
        "def control(x):\n    return 2 * x\n"
        "def main(other):\n"
        "    found = [None]\n"
        "    dist.all_gather_object(found, (main, kernel, other))\n"
        "    return [f is main for f in found[0][:1]] + [f(3) for f in found[0][1:]]\n"
    )
    assert kernel.run("launch(main, control, world_size=1)") == "[[True, 4, 6]]"
