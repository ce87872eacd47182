"""Grids, blocks and arguments that do not fit are refused before anything runs."""

from __future__ import annotations

import pytest
import torch

from kernels import load
from kernels.loader import Kernel

SCALE = """
extern "C" __global__ void scale(const float* a, float* c, float factor, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) c[i] = factor * a[i];
}
extern "C" __global__ void types(
    double* d, int* i, unsigned int* u, long long* l, unsigned char* b, int8_t* s, bool* t,
    double x, long long n, unsigned m, bool flag) {
    d[0] = x; i[0] = -3; u[0] = m; l[0] = n; b[0] = 200; s[0] = -2; t[0] = flag;
}
"""


@pytest.fixture(scope="module")
def scale() -> Kernel:
    return load(source=SCALE).scale


def arguments() -> list[object]:
    """A right set."""
    return [torch.ones(4), torch.zeros(4), 2.5, 4]


def test_a_right_launch(scale: Kernel) -> None:
    given = arguments()
    report = scale[1, 4](*given)
    assert given[1].tolist() == [2.5] * 4  # type: ignore[attr-defined]
    assert (report.kernel, report.device, report.grid, report.block) == (
        "scale",
        "cpu",
        (1, 1, 1),
        (4, 1, 1),
    )
    assert report.num_threads == 4


def test_each_type_arrives() -> None:
    tensors = [
        torch.zeros(1, dtype=dtype)
        for dtype in (
            torch.float64,
            torch.int32,
            torch.uint32,
            torch.int64,
            torch.uint8,
            torch.int8,
            torch.bool,
        )
    ]
    load(source=SCALE).types[1, 1](*tensors, 0.1, -(2**40), 2**32 - 1, True)
    assert [t.item() for t in tensors] == [0.1, -3, 2**32 - 1, -(2**40), 200, -2, True]


@pytest.mark.parametrize(
    ("position", "value", "error", "message"),
    [
        (0, torch.ones(4).double(), ValueError, r"expected torch.float32; found torch.float64"),
        (0, torch.ones(8)[::2], ValueError, r"float\* a' of scale: the tensor's strides \(2,\)"),
        (0, torch._neg_view(torch.ones(4)), ValueError, r"negated lazily.*\.resolve_neg\(\)"),
        (1, torch.ones(4, device="meta"), ValueError, "loaded for cpu, and the tensor is on meta"),
        (1, [0.0] * 4, TypeError, r"'float\* c' of scale: expected a tensor, or None .*found list"),
        (2, "2", TypeError, "'float factor' of scale: expected a number; found str '2'"),
        (3, 4.0, TypeError, "'int n' of scale: expected an int; found float 4.0"),
        (3, 2**31, ValueError, "'int n' of scale: 2147483648 does not fit into int"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(
    scale: Kernel, position: int, value: object, error: type[Exception], message: str
) -> None:
    given = arguments()
    given[position] = value
    with pytest.raises(error, match=message):
        scale[1, 4](*given)


def test_a_wrong_number_of_arguments(scale: Kernel) -> None:
    with pytest.raises(
        TypeError, match=r"scale\(const float\* a, .*int n\) takes 4 arguments; found 3"
    ):
        scale[1, 4](*arguments()[:3])


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (5, TypeError, r"kernel\[grid, block\]"),
        ((1, 2, 3, 4), TypeError, r"kernel\[grid, block, shared_bytes\]"),
        ((1, (32, 33)), ValueError, "32 x 33 x 1 has 1056 threads; a GPU takes at most 1024"),
        ((0, 32), ValueError, "grid.x must be 1 to 2147483647; found 0"),
        (((1, 70000), 32), ValueError, "grid.y must be 1 to 65535; found 70000"),
        ((1, (1, 1, 65)), ValueError, "block.z must be 1 to 64; found 65"),
        ((1.5, 32), TypeError, "grid is an int or a tuple of up to three; found 1.5"),
        ((1, 32, 300_000), ValueError, "0 to 232448; found 300000"),
    ],
)
def test_a_wrong_configuration_is_refused(
    scale: Kernel, index: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        scale[index]


SHARED = """
extern "C" __global__ void large(float* c) {
    __shared__ float values[N];
    extern __shared__ float more[];
    values[threadIdx.x] = more[threadIdx.x] = 1.0f;
    __syncthreads();
    c[threadIdx.x] = values[0] + more[0];
}
"""


@pytest.mark.parametrize("count", [True, False])
@pytest.mark.parametrize(
    ("floats", "dynamic", "fits"),
    [
        (12 * 1024, 4, True),
        (12 * 1024 + 1, 4, False),
        (8 * 1024, 195 * 1024, True),
        (8 * 1024, 195 * 1024 + 4, False),
    ],
)
def test_more_shared_memory_than_a_gpu_has_is_refused(
    floats: int, dynamic: int, fits: bool, count: bool
) -> None:
    kernel = load(source=SHARED, defines={"N": floats}, count=count).large
    c = torch.zeros(1)
    if fits:
        kernel[1, 1, dynamic](c)
        assert float(c) == 2
        return
    with pytest.raises(ValueError, match=f"large: {4 * floats} bytes of static and {dynamic} of"):
        kernel[1, 1, dynamic](c)


def test_a_kernel_is_not_called_without_a_grid(scale: Kernel) -> None:
    with pytest.raises(TypeError, match=r"scale needs a grid and a block: scale\[grid, block\]"):
        scale(*arguments())


def test_a_notebook_shows_the_message_alone(scale: Kernel) -> None:
    with pytest.raises(ValueError) as error:
        scale[1, 4](torch.ones(4, dtype=torch.float64), torch.zeros(4), 2.5, 4)
    assert error.value._render_traceback_() == f"ValueError: {error.value}".splitlines()  # type: ignore[attr-defined]
    assert "Report(" not in repr(scale[1, 4](*arguments()))
