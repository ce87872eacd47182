"""What torch.compile writes, read back: kernels, loads, library calls, and nothing left behind."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.nn.functional as F

from kernels.generated import cpp_code, triton_code

pytest.importorskip("triton", reason="made for Linux")
# PyTorch's compiler warns about itself: deprecated calls, forks of a threaded process.
pytestmark = pytest.mark.filterwarnings("default")


def chain(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x < 0, x.exp() - 1, x)


def test_a_chain_is_one_kernel() -> None:
    code = triton_code(chain, torch.randn(7, 11))
    (kernel,) = code.kernels
    assert kernel.name.startswith("triton_") and kernel.body.startswith(f"def {kernel.name}(")
    assert (kernel.num_loads, kernel.num_stores) == (1, 1)
    assert "xnumel = 77" in kernel.body and "tl.store(" in kernel.body.splitlines()[-1]
    assert code.library_calls == ()


def test_two_kernels_and_a_product_between() -> None:
    code = triton_code(lambda a, b: chain(chain(a) @ b), torch.randn(64, 32), torch.randn(32, 64))
    assert len(code.kernels) == 2 and code.library_calls == ("mm",)
    assert {kernel.name for kernel in code.kernels} == set(
        line.split(" = ")[0] for line in code.text.splitlines() if "async_compile.triton(" in line
    )


def test_dynamic_has_no_size_in_it() -> None:
    (kernel,) = triton_code(chain, torch.randn(77), dynamic=True).kernels
    assert "77" not in kernel.body


def test_the_driver_and_the_settings_are_put_back() -> None:
    import torch._inductor.config as inductor_config
    from triton.runtime import driver

    before = driver._active, inductor_config.cpu_backend
    triton_code(F.silu, torch.randn(8))
    assert (driver._active, inductor_config.cpu_backend) == before


def test_no_tensor_no_code() -> None:
    with pytest.raises(RuntimeError, match="wrote no code"):
        triton_code(lambda x: 3, torch.ones(2))


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
@pytest.mark.slow
def test_cpp_runs_and_is_read() -> None:
    x = torch.randn(77)
    compiled, code = cpp_code(chain, x)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), chain(x))
    (kernel,) = code.kernels
    assert kernel.name.startswith("cpp_fused_") and kernel.body.startswith('extern "C"')
    assert "77" in kernel.body and "exp()" in kernel.body
