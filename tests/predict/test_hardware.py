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


# GiB as printed, MiB that the driver reports; T/s in BF16 and FP8; GB/s of memory and of NVLink.
TABLE = {
    "v100-32gb": (32, None, None, None, 900, 150),
    "t4": (16, 15_360, None, None, 320, None),
    "a100-40gb": (40, 40_960, 312, None, 1555, 300),
    "a100-80gb": (80, 81_920, 312, None, 2039, 300),
    "h100-sxm": (80, 81_559, 989.4, 1978.9, 3350, 450),
    "h100-nvl": (94, None, 835.5, 1670.5, 3900, 300),
    "h100-pcie": (80, None, 756, 1513, 2000, 300),
    "h800-sxm": (80, None, 989.4, 1978.9, 3350, 200),
    "h200": (141, 143_771, 989.4, 1978.9, 4800, 450),
    "b200": (180, None, 2250, 4500, 8000, 900),
    "gb200": (186, None, 2500, 5000, 8000, 900),
    "mi300x": (192, None, 1307.4, 2614.9, 5300, 448),
    "mi325x": (256, None, 1307.4, 2614.9, 6000, 448),
    "l4": (24, 23_034, 121, 242, 300, None),
    "l40s": (48, 46_068, 362, 733, 864, None),
    "rtx-3090": (24, None, 71, None, 936, 56.25),
    "rtx-4090": (24, None, 165.2, 330.3, 1008, None),
}


def times(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


def test_every_number_of_every_gpu() -> None:
    assert list(GPUS) == list(TABLE)
    for name, (gib, mib, bf16, fp8, memory, link) in TABLE.items():
        row = GPUS[name]
        assert row.memory_bytes == gib * GIB, name
        assert row.reported_bytes == times(mib, 2**20), name
        assert row.usable_bytes == (gib * GIB if mib is None else mib * 2**20), name
        assert row.bf16_flops_per_s == times(bf16, 1e12), name
        assert row.fp8_flops_per_s == times(fp8, 1e12), name
        assert row.memory_bytes_per_s == times(memory, 1e9), name
        assert row.link_bytes_per_s == times(link, 1e9), name


def test_a_name_is_text() -> None:
    with pytest.raises(TypeError, match="the name of a GPU is None, a NoneType: expected str"):
        gpu(None)  # type: ignore[arg-type]


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
