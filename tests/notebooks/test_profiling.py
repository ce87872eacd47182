"""What lesson 04 exports: the simulated device, the stopwatches, the profiler's helpers, the
C++ operator. No test reads a real clock."""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule
from torch.utils import cpp_extension

import playbook_utils  # noqa: F401 (makes `notebooks` importable, as in a lesson)
from notebooks.profiling import (
    ADD_SOURCE,
    CUDA_KERNEL,
    CUDA_SOURCE,
    QueuedDevice,
    TimedDevice,
    _Event,
    build_operator,
    compile_directly,
    count_calls,
    idle_fraction,
    prefetch,
    profile_steps,
    time_naively,
    time_with_events,
    train_step,
)
from playbook_utils.data import GeneratedLanguage
from playbook_utils.events import Span
from playbook_utils.measure import measure_time
from playbook_utils.model import Decoder, DecoderConfig, cross_entropy
from tests.notebooks.exercises import Lesson

CONFIG = DecoderConfig.tiny(dim=16, ff_dim=24, num_layers=3)
BATCH = GeneratedLanguage().batch(0, batch_size=2, seq_len=8)
COMPILER = shutil.which(cpp_extension.get_cxx_compiler())


def training() -> tuple[Decoder, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Decoder(CONFIG)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def test_a_kernel_starts_when_it_is_launched_and_its_stream_is_free() -> None:
    device = QueuedDevice(launch_s=1.0)
    assert device.launch("a", 5.0) == 6.0  # launched at 1
    assert device.launch("b", 5.0) == 11.0  # launched at 2, free at 6
    assert device.launch("c", 1.0, "communication", "second") == 4.0  # a stream of its own
    assert device.launch("d", 1.0, "communication", "second", after_s=11.0) == 12.0
    assert device.clock() == 4.0
    rows = [(s.name, s.lane, s.start_s, s.end_s) for s in device.spans if s.lane != "host"]
    assert rows == [
        ("a", "compute", 1.0, 6.0),
        ("b", "compute", 6.0, 11.0),
        ("c", "second", 3.0, 4.0),
        ("d", "second", 11.0, 12.0),
    ]
    host = [(s.name, s.start_s, s.end_s) for s in device.spans if s.lane == "host"]
    assert host == [("a", 0, 1), ("b", 1, 2), ("c", 2, 3), ("d", 3, 4)]


def test_synchronize_waits_for_all_streams_and_then_for_nothing() -> None:
    device = QueuedDevice(launch_s=1.0)
    device.synchronize()
    assert device.clock() == 0.0 and device.spans == []
    device.launch("a", 5.0)
    device.launch("b", 9.0, stream="second")
    for _ in range(2):
        device.synchronize()
        assert device.clock() == 11.0
    assert [s for s in device.spans if s.name == "wait"] == [
        Span(0, "wait", "idle", 2.0, 11.0, "host")
    ]


@pytest.mark.parametrize(
    ("kernel_s", "waited_s", "event_s"), [(40.0, 42.0, 40.0), (0.5, 2.5, 2.0), (2.0, 4.0, 2.0)]
)
def test_three_stopwatches_answer_three_questions(
    kernel_s: float, waited_s: float, event_s: float
) -> None:
    device = TimedDevice(launch_s=2.0)

    def work() -> None:
        device.launch("kernel", kernel_s)

    timing = measure_time(work, clock=device.clock, synchronize=device.synchronize)
    assert set(timing.samples_s) == {waited_s}
    assert time_naively(work, device.clock) == 2.0
    assert time_with_events(work, device) == event_s


def test_events_take_the_median_after_the_warmup() -> None:
    device = TimedDevice(launch_s=0.0)
    kernels_s = iter([100.0] * 2 + [3.0, 3.0, 50.0, 1.0, 3.0])
    found_s = time_with_events(
        lambda: device.launch("kernel", next(kernels_s)), device, warmup=2, repeats=5
    )
    assert found_s == 3.0


def test_events_are_read_only_once_the_device_has_reached_them() -> None:
    class StrictEvent(_Event):  # type: ignore[misc]
        def elapsed_time(self, end: Any) -> float:
            if end.at_s > end.device.now_s:  # CUDA raises in this case, too
                raise RuntimeError("device not ready")
            return float(super().elapsed_time(end))

    class StrictDevice(TimedDevice):  # type: ignore[misc]
        def Event(self, enable_timing: bool) -> StrictEvent:
            return StrictEvent(self)

    device = StrictDevice(launch_s=1.0)
    assert time_with_events(lambda: device.launch("kernel", 5.0), device) == 5.0


def test_an_event_in_an_empty_queue_is_reached_when_it_is_recorded() -> None:
    device = TimedDevice(launch_s=1.0)
    start, end = device.Event(enable_timing=True), device.Event(enable_timing=True)
    device.launch("kernel", 2.0)
    device.synchronize()
    start.record()
    device.now_s += 5.0  # the host does something else
    end.record()
    assert start.elapsed_time(end) == 5000.0


def test_idle_fraction_of_a_row() -> None:
    device = QueuedDevice(launch_s=10.0)
    for _ in range(4):
        device.launch("kernel", 5.0)
    assert idle_fraction(device.spans) == pytest.approx(1 - 20 / 35)
    assert idle_fraction(device.spans, lane="host") == 0.0
    waiting = [Span(0, "wait", "idle", 0.0, 3.0), Span(0, "f", "forward", 3.0, 4.0)]
    assert idle_fraction(waiting) == 0.75


@pytest.mark.parametrize("kernel_us", [1, 2, 5, 10, 50])
def test_the_idle_share_of_launches_tends_to_one_less_kernel_over_launch(kernel_us: int) -> None:
    device = QueuedDevice(launch_s=10e-6)
    for _ in range(1000):
        device.launch("kernel", kernel_us * 1e-6)
    length_us = 999 * max(10, kernel_us) + kernel_us
    found = idle_fraction(device.spans)
    assert found == pytest.approx(1 - 1000 * kernel_us / length_us, abs=1e-9)
    assert found == pytest.approx(max(0, 1 - kernel_us / 10), abs=1e-3)


def test_a_schedule_without_repeat_starts_over_as_the_lesson_says_of_the_book() -> None:
    traces_after: list[int] = []
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=3),
        on_trace_ready=lambda prof: traces_after.append(prof.step_num),
        acc_events=True,
    ) as prof:
        for _ in range(23):
            _ = torch.ones(2) + 1
            prof.step()
    assert traces_after == [5, 10, 15, 20, 23]
    assert count_calls(prof)["aten::add"] == 4 * 3 + 1


def test_the_books_layer_norm_mixes_tokens_as_the_lesson_says() -> None:
    torch.manual_seed(0)
    activations = torch.randn(2, 5, 16) + torch.arange(5.0)[:, None]  # tokens differ
    book = F.layer_norm(activations, activations.size()[1:])
    ours = F.layer_norm(activations, activations.size()[-1:])
    assert book.mean(-1).abs().max() > 0.1
    assert ours.mean(-1).abs().max() < 1e-5


def test_the_profiler_records_all_steps_but_the_first_two() -> None:
    done: list[int] = []
    prof = profile_steps(lambda i: done.append(i) or torch.ones(1) + i, num_steps=6)  # type: ignore[func-returns-value]
    assert done == [0, 1, 2, 3, 4, 5]
    assert count_calls(prof)["aten::add"] == 4
    names = [e.name for e in prof.events() if e.name.startswith("ProfilerStep")]
    assert len(names) == 4


def test_the_profiler_records_one_cycle_and_does_not_start_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import notebooks.profiling as lesson

    plans: list[Any] = []
    monkeypatch.setattr(lesson, "schedule", lambda **how: plans.append(schedule(**how)) or plans[0])
    profile_steps(lambda _: None, num_steps=5)
    actions = [plans[0](step) for step in range(10)]
    record, last = ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE
    assert actions[:5] == [ProfilerAction.NONE, ProfilerAction.WARMUP, record, record, last]
    assert actions[5:] == [ProfilerAction.NONE] * 5


def test_calls_are_counted_by_block() -> None:
    model, optimizer = training()
    prof = profile_steps(lambda _: train_step(model, optimizer, BATCH), num_steps=4)
    products = 7 * CONFIG.num_layers + 1
    assert count_calls(prof, "forward")["aten::mm"] == 2 * products
    assert count_calls(prof, "backward")["aten::mm"] == 2 * 2 * products
    assert count_calls(prof, "optimizer")["aten::mm"] == 0
    assert count_calls(prof)["aten::mm"] == 2 * 3 * products
    assert count_calls(prof, "no such block") == {}


def test_a_train_step_is_a_train_step() -> None:
    model, optimizer = training()
    losses = [train_step(model, optimizer, BATCH) for _ in range(3)]
    assert not losses[0].requires_grad and all(p.grad is None for p in model.parameters())
    model, optimizer = training()
    for found in losses:
        loss = cross_entropy(model(BATCH[0]), BATCH[1])
        assert torch.equal(found, loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_prefetch_gives_the_same_batches_and_stays_one_ahead() -> None:
    loaded: list[int] = []
    main = threading.get_ident()

    def load(num: int) -> Iterator[int]:
        for i in range(num):
            assert threading.get_ident() != main
            loaded.append(i)
            yield i

    used = []
    for i in prefetch(load(5)):
        assert len(loaded) <= i + 2
        used.append(i)
    assert used == loaded == [0, 1, 2, 3, 4]
    assert list(prefetch([])) == []
    assert list(prefetch([None, 0])) == [None, 0]  # values that are false


def test_prefetch_loads_while_the_batch_is_used() -> None:
    asked = threading.Event()

    def load() -> Iterator[int]:
        yield 0
        asked.set()
        yield 1

    batches = prefetch(load())
    assert next(batches) == 0
    assert asked.wait(timeout=20)  # although nobody has asked for batch 1 yet
    assert list(batches) == [1]


def test_prefetch_raises_what_the_loader_raises() -> None:
    def load() -> Iterator[int]:
        yield 0
        raise OSError("disk")

    batches = prefetch(load())
    assert next(batches) == 0
    with pytest.raises(OSError, match="disk"):
        next(batches)


@pytest.fixture(scope="module")
def add() -> Callable[..., Any]:
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    assert build_operator(ADD_SOURCE, "course::add") is True
    assert build_operator("a second time nothing is built", "course::add") is True
    found: Callable[..., Any] = torch.ops.course.add
    return found


def test_the_operator_without_a_gradient_only_warns(guarded_add: Callable[..., Any]) -> None:
    x = torch.ones(3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        guarded_add(x, torch.ones(3)).sum().backward()
    assert x.grad is None  # as the lesson says; then it registers one


def run_the_check_cell() -> str:
    """Cell cpp-check as it stands in the notebook; what it printed."""
    cells = Lesson.read("04_profiling").cells
    (source,) = (cell.source for cell in cells if cell.id == "cpp-check")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(source, {"torch": torch})
    return printed.getvalue()


def test_what_the_lesson_registers_passes_torchs_own_checks(add: Callable[..., Any]) -> None:
    assert run_the_check_cell().count("{'SUCCESS'}") == 2
    x, y = torch.randn(2, 70, 30)
    for a, b in ((x, y), (x.t(), y.t()), (x[:0], y[:0])):
        for grad in (False, True):
            pair = [t.detach().requires_grad_(grad) for t in (a, b)]
            results = torch.library.opcheck(add, pair)
            assert set(results.values()) == {"SUCCESS"}
        assert add(a.to("meta"), b.to("meta")).stride() == add(a, b).stride()
    with pytest.raises(RuntimeError, match="differ in shape"):
        add(x.to("meta"), y[:3].to("meta"))


def test_an_operator_that_was_not_built_is_told_apart() -> None:
    stand_in = torch.library.Library("course_stand_in", "DEF")
    stand_in.define("add(Tensor x, Tensor y) -> Tensor")
    assert build_operator("nothing is built", "course_stand_in::add") is False


def guarded(source: str) -> str:
    """The same source as course_guarded::add, its result amid 2 x 1024 numbers that are 7."""
    allocation = "Tensor out = torch::stable::empty_like(a);"
    assert source.count(allocation) == 1 and "(course, " in source
    wide = (
        "Tensor wide = torch::stable::new_empty(a, {a.numel() + 2048});\n"
        "  torch::stable::fill_(wide, 7.0);\n"
        "  Tensor out = torch::stable::narrow(wide, 0, 1024, a.numel());"
    )
    return source.replace(allocation, wide).replace("(course, ", "(course_guarded, ")


def expect_guards_untouched(add: Callable[..., Any], device: str) -> None:
    for size in (0, 1, 1023, 1024, 1025):
        x, y = torch.randn(2, size, device=device)
        out = add(x, y)
        assert out.shape == (size,) and torch.equal(out, x + y), size
        whole = out.as_strided((size + 2048,), (1,), 0)
        assert torch.equal(whole[1024:-1024], x + y), size
        assert (whole[:1024] == 7).all() and (whole[-1024:] == 7).all(), size


@pytest.fixture(scope="module")
def guarded_add(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Compiled without ninja."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("guarded")
    torch.ops.load_library(compile_directly(COMPILER, guarded(ADD_SOURCE), folder))
    found: Callable[..., Any] = torch.ops.course_guarded.add
    return found


def test_the_operator_writes_its_result_and_nothing_beside_it(
    guarded_add: Callable[..., Any],
) -> None:
    expect_guards_untouched(guarded_add, "cpu")


@pytest.mark.parametrize("shape", [(), (0,), (1,), (17,), (3, 5, 7)])
def test_the_operator_adds(add: Callable[..., Any], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, *shape)
    assert torch.equal(add(x, y), x + y)
    assert add(x, y).shape == shape


def test_the_operator_takes_strides_and_refuses_the_rest(add: Callable[..., Any]) -> None:
    x, y = torch.randn(2, 6, 4)
    assert torch.equal(add(x.t(), y.t()), (x + y).t())
    assert torch.equal(add(x[::2], y[1::2]), x[::2] + y[1::2])
    for a, b in ((x, y[:3]), (x, y.double()), (x.double(), y.double()), (x, y[0])):
        with pytest.raises(RuntimeError, match=r"differ in shape|expected scalar type Float"):
            add(a, b)


def test_without_ninja_the_compiler_is_called_directly(
    guarded_add: Callable[..., Any], tmp_path: Path
) -> None:
    x, y = torch.randn(2, 9)
    assert torch.equal(guarded_add(x, y), x + y)
    with pytest.raises(RuntimeError, match=r"failed:\n(?s:.)*no_such_type"):
        compile_directly(COMPILER, "no_such_type x;", tmp_path)


def test_a_missing_ninja_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import notebooks.profiling as lesson

    called, library = [], torch.library.Library("course_nowhere", "DEF")

    def load(path: str) -> None:
        called.append(path)
        library.define("loaded(Tensor x) -> Tensor")

    monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: False)
    monkeypatch.setattr(lesson.shutil, "which", lambda name: name)
    monkeypatch.setattr(torch.ops, "load_library", load)
    monkeypatch.setattr(lesson, "compile_directly", lambda *args: args[0])
    for _ in range(2):
        assert build_operator(ADD_SOURCE, "course_nowhere::loaded") is True
    assert called == [cpp_extension.get_cxx_compiler()]


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler 'no-such-compiler': install g"):
        build_operator(ADD_SOURCE, "course_nowhere::add")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.slow
def test_the_cuda_source_compiles_with_and_without_guards(tmp_path: Path) -> None:
    assert CUDA_KERNEL in CUDA_SOURCE
    file = tmp_path / "add.cu"
    includes = [line for line in CUDA_SOURCE.splitlines() if line.startswith("#include")]
    both = [
        f"namespace n{i} {{\n{s}\n}}" for i, s in enumerate((CUDA_SOURCE, guarded(CUDA_SOURCE)))
    ]
    file.write_text("\n".join([*includes, *both]))  # included once more they are empty
    command = ["nvcc", "-std=c++20", "-DUSE_CUDA", "-c", str(file), "-o", str(tmp_path / "add.o")]
    command += [f"-I{path}" for path in cpp_extension.include_paths()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.slow
def test_a_cuda_thread_moves_twelve_bytes_for_one_addition(tmp_path: Path) -> None:
    file, ptx = tmp_path / "add.cu", tmp_path / "add.ptx"
    file.write_text(CUDA_KERNEL)
    subprocess.run(["nvcc", "--ptx", str(file), "-o", str(ptx)], check=True)
    text = ptx.read_text()
    assert [text.count(word) for word in ("ld.global", "st.global", "add.f32")] == [2, 1, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_events_and_the_host_agree_on_a_gpu() -> None:
    a = torch.randn(4096, 4096, device="cuda")
    event_s = time_with_events(lambda: a @ a, torch.cuda)
    host_s = measure_time(lambda: a @ a).median_s
    assert 0 < event_s < host_s * 1.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_cuda_operator_writes_its_result_and_nothing_beside_it(
    guarded_add: Callable[..., Any], tmp_path: Path
) -> None:
    cpp_extension.load_inline(
        "course_guarded_cuda", "", cuda_sources=guarded(CUDA_SOURCE), is_python_module=False,
        build_directory=str(tmp_path), no_implicit_headers=True, with_cuda=True,
        extra_cuda_cflags=["-DUSE_CUDA"],
    )  # fmt: skip
    expect_guards_untouched(guarded_add, "cuda")
