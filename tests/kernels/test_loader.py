"""Loading .cu files: by name, path and text; errors; the cache; nvcc where it is installed."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import kernels
from kernels import load
from kernels.build import build, cache_folder
from kernels.errors import CompileError
from kernels.nvcc import compile_for_gpu, kernel_address
from kernels.source import CUDA_FOLDER, read_source

FILL = """
#ifndef VALUE
#define VALUE 1
#endif
// extern "C" __global__ void commented_out(int n) {}
extern "C" __global__ void fill(float* c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = VALUE;
}
"""


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder for this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ultra-scale-kernels"


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the emulator's runtime, which takes seconds to compile."""
    base = tmp_path_factory.mktemp("runtime")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(base))
        load(source=FILL)
    cache = base / "ultra-scale-kernels"
    (kernel,) = {file.parent for file in cache.glob("*/kernel.so")}
    shutil.rmtree(kernel)
    return cache


@pytest.fixture
def runtime_cache(own_cache: Path, runtime: Path) -> Path:
    """A cache folder for this test that holds the runtime alone."""
    shutil.copytree(runtime, own_cache)
    return own_cache


@pytest.mark.parametrize(
    "name", ["01_vector_add", "01_vector_add.cu", CUDA_FOLDER / "01_vector_add.cu"]
)
def test_a_file_is_found_by_name_or_path(name: str | Path) -> None:
    module = load(name)
    assert module.kernels == ("vector_add",)
    assert "vector_add(const float* a, const float* b, float* c, int n)" in repr(module)


def test_defines_and_text() -> None:
    c = torch.zeros(5)
    module = load(source=FILL, defines={"VALUE": 7})
    assert module.kernels == ("fill",)
    module.fill[1, 8](c, 5)
    assert c.tolist() == [7.0] * 5
    load(source=FILL).fill[1, 8](c, 5)
    assert c.tolist() == [1.0] * 5


def test_an_edited_file_or_include_is_compiled_anew(tmp_path: Path) -> None:
    file, header = tmp_path / "mine.cu", tmp_path / "value.h"
    file.write_text('#include "value.h"\n' + FILL)
    c = torch.zeros(1)
    for value in (2, 3):
        header.write_text(f"#define VALUE {value}\n")
        load(file).fill[1, 1](c, 1)
        assert float(c) == value
    file.write_text(FILL.replace("= VALUE", "= 9"))
    load(file).fill[1, 1](c, 1)
    assert float(c) == 9


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"no CUDA file '99_missing'.*01_vector_add"):
        load("99_missing")
    with pytest.raises(AttributeError, match=r"source\.cu has no kernel 'fil'; it has fill"):
        _ = load(source=FILL).fil
    with pytest.raises(ValueError, match="not both"):
        load("01_vector_add", source=FILL)
    with pytest.raises(ValueError, match="device must be 'cpu', 'cuda' or None; found 'tpu'"):
        load(source=FILL, device="tpu")
    with pytest.raises(ValueError, match="defines must name macros"):
        load(source=FILL, defines={"-DX": 1})


def test_a_file_without_a_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel in the source: expected __global__ void"):
        load(source="void f() {} __global__ void declared(int n);")


def test_a_compile_error_is_one_line(runtime_cache: Path) -> None:
    with pytest.raises(CompileError) as caught:
        load(source=FILL.replace("= VALUE", "= VALEU"))
    text = str(caught.value)
    assert text.startswith("g++ did not accept source.cu:8 (if (i < n) c[i] = VALEU;): ")
    assert "VALEU" in text.partition("): ")[2] and "\n" not in text
    assert len(list(runtime_cache.iterdir())) == 1, "a failed build leaves nothing"


def test_no_compiler_and_other_processors(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        CompileError, match=r"neither g\+\+ nor clang\+\+ was found.*apt install g\+\+"
    ):
        load(source=FILL, device="cpu")
    with pytest.raises(CompileError, match="needs nvcc, which was not found"):
        compile_for_gpu(read_source(None, FILL), {"fill": "fill"}, {}, "sm_90")
    monkeypatch.setattr("kernels.emulator.compile.platform.machine", lambda: "arm64")
    with pytest.raises(CompileError, match="Linux on x86-64 processors; found linux on arm64"):
        load(source=FILL, device="cpu")


def test_a_gpu_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(CompileError, match="needs a GPU that PyTorch can use"):
        load(source=FILL, device="cuda")


def test_each_combination_is_compiled_once(runtime_cache: Path) -> None:
    load(source=FILL)
    first = {path: path.stat().st_mtime_ns for path in runtime_cache.iterdir()}
    assert len(first) == 2  # the runtime, and this kernel
    load(source=FILL)
    assert {path: path.stat().st_mtime_ns for path in runtime_cache.iterdir()} == first
    load(source=FILL, defines={"VALUE": 2})
    load(source=FILL, count=False)
    assert len(list(runtime_cache.iterdir())) == 4


def test_builders_at_the_same_time_get_one_whole_result(own_cache: Path) -> None:
    def compile_into(folder: Path) -> None:
        (folder / "product").write_text("whole")

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: build(["same"], ("product",), compile_into), range(32)))
    assert len(set(folders)) == 1
    assert [path.name for path in own_cache.iterdir()] == [folders[0].name]
    assert (folders[0] / "product").read_text() == "whole"


def test_processes_may_load_at_the_same_time(runtime_cache: Path) -> None:
    code = "from kernels import load; import torch; c = torch.zeros(4)\n"
    code += f"load(source={FILL!r}).fill[1, 4](c, 4); assert c.sum() == 4"
    root = str(Path(kernels.__file__).parents[1])
    running = [subprocess.Popen([sys.executable, "-c", code], cwd=root) for _ in range(2)]
    assert [process.wait(timeout=100) for process in running] == [0, 0]
    assert len(list(runtime_cache.iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_replaced(
    runtime_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime_cache.rename(tmp_path / f"ultra-scale-kernels-{os.getuid()}")
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    c = torch.zeros(1)
    load(source=FILL).fill[1, 1](c, 1)
    assert float(c) == 1
    assert len(list(tmp_path.glob("ultra-scale-kernels-*/*/kernel.so"))) == 1


@pytest.mark.parametrize("trouble", ["others may write", "a link", "no home"])
def test_a_cache_that_is_not_safe_is_replaced(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if trouble == "others may write":
        own_cache.mkdir()
        own_cache.chmod(0o777)
    elif trouble == "a link":
        (tmp_path / "elsewhere").mkdir()
        own_cache.symlink_to(tmp_path / "elsewhere")
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    own = tmp_path / f"ultra-scale-kernels-{os.getuid()}"
    assert cache_folder() == own
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o770)
    with pytest.raises(CompileError, match=r"no place for compiled kernels .*XDG_CACHE_HOME"):
        cache_folder()


@pytest.mark.parametrize("lost", ["kernel.so", "kernel.o"])
def test_a_file_that_was_lost_is_made_anew(runtime_cache: Path, lost: str) -> None:
    load(source=FILL)
    (file,) = runtime_cache.glob(f"*/{lost}")
    file.unlink()
    c = torch.zeros(1)
    load(source=FILL).fill[1, 1](c, 1)
    assert float(c) == 1
    assert file.exists()
    assert len(list(runtime_cache.iterdir())) == 2


def test_a_path_with_a_space_keeps_its_line_numbers(tmp_path: Path) -> None:
    file = tmp_path / "my kernels" / "fill it.cu"
    file.parent.mkdir()
    file.write_text(FILL)
    report = load(file).fill[1, 8](torch.zeros(5), 5)
    assert {line.line for line in report.by_line if line.kind == "global store"} == {8}


def test_a_kernel_that_is_switched_off_is_not_there() -> None:
    old = 'extern "C" __global__ void old(int n) {}\n'
    off = f"#if 0  // not now\n#if 1\n{old}#endif\n#elif 1\n{FILL}#endif\n#if 1\n#endif\n"
    assert load(source=off).kernels == ("fill",)


def test_importing_the_package_loads_nothing() -> None:
    code = (
        "import sys, kernels; assert 'torch' not in sys.modules; assert 'load' in kernels.__all__"
    )
    root = Path(kernels.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)


def test_threads_of_the_process_take_turns() -> None:
    kernel = load(source=FILL).fill
    tensors = [torch.zeros(3000) for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(lambda c: kernel[12, 256](c, 3000), tensors))
    assert all(bool((c == 1).all()) for c in tensors)
    assert len(set(reports)) == 1
    assert reports[0].global_stores == 3000


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_nvcc_takes_the_same_file(own_cache: Path) -> None:
    source = read_source(None, FILL)
    library = ctypes.CDLL(str(compile_for_gpu(source, {"fill": "fill"}, {"VALUE": "2"}, "sm_90")))
    address = kernel_address(library, "fill")
    assert address.value
    if not torch.cuda.is_available():  # a launch gets as far as CUDA, which says that it cannot
        library.kernels_launch.restype = ctypes.c_char_p
        one = (ctypes.c_uint32 * 3)(1, 1, 1)
        assert b"CUDA" in library.kernels_launch(address, 0, one, one, None, 0, None)
    with pytest.raises(
        CompileError, match=r"nvcc did not accept source.cu:\nsource.cu\(8\): error"
    ):
        compile_for_gpu(
            read_source(None, FILL.replace("= VALUE", "= VALEU")), {"fill": "fill"}, {}, "sm_90"
        )


@pytest.mark.gpu
def test_a_gpu_runs_the_same_launch() -> None:
    if not torch.cuda.is_available() or shutil.which("nvcc") is None:
        pytest.skip("needs an NVIDIA GPU and nvcc")
    c = torch.zeros(1000, device="cuda")
    report = load(source=FILL, device="cuda").fill[4, 256](c, 1000)
    assert bool((c == 1).all())
    assert report.global_stores is None
    assert "not counted" in report.table()
