"""The table of accelerators: units, halves, and names."""

from __future__ import annotations

import pytest

from playbook_utils.predict.hardware import GPUS, gpu

GIB = 2**30


def test_an_h100_in_every_unit() -> None:
    h100 = gpu("h100")
    assert h100.name == "h100-sxm"
    assert h100.memory_bytes == 80 * GIB
    assert h100.reported_bytes is not None
    assert round(h100.reported_bytes / GIB, 2) == 79.65
    assert h100.bf16_flops_per_s == 989.4e12  # 1,979 with sparsity on the data sheet
    assert h100.fp8_flops_per_s == 1978.9e12
    assert h100.memory_bytes_per_s == 3.35e12
    assert h100.link_bytes_per_s == 450e9  # "900 GB/s" both ways


@pytest.mark.parametrize("name", GPUS)
def test_rows_are_plausible_and_have_a_source(name: str) -> None:
    row = GPUS[name]
    assert row.name == name == name.lower()
    assert len(row.source) > 10
    assert row.memory_bytes % GIB == 0
    if row.reported_bytes is not None:
        assert 0.93 * row.memory_bytes < row.reported_bytes <= row.memory_bytes
    if row.bf16_flops_per_s is not None and row.fp8_flops_per_s is not None:
        assert row.fp8_flops_per_s / row.bf16_flops_per_s == pytest.approx(2, rel=0.02)
    if row.link_bytes_per_s is not None and row.memory_bytes_per_s is not None:
        assert row.link_bytes_per_s < row.memory_bytes_per_s
    if row.bf16_flops_per_s is not None and row.memory_bytes_per_s is not None:
        # Operations a byte of memory: the ridge of the roofline, 70 to 420 for all of them.
        assert 70 < row.bf16_flops_per_s / row.memory_bytes_per_s < 420


def test_chips_without_bf16_say_so() -> None:
    assert gpu("t4").bf16_flops_per_s is None
    assert gpu("v100").fp8_flops_per_s is None
    assert gpu("a100").fp8_flops_per_s is None


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("H100 SXM", "h100-sxm"),
        ("a100_40gb", "a100-40gb"),
        (" MI300X ", "mi300x"),
        ("a100", "a100-80gb"),
    ],
)
def test_names_as_people_write_them(written: str, name: str) -> None:
    assert gpu(written).name == name


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'h10' \(did you mean h100\?\): .*t4, a100-40gb"):
        gpu("h10")
