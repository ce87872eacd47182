"""Accelerators: memory, peak rates and links, each with its source.

- Rates are dense. Data sheets print twice as much, "with sparsity", in large letters.
- Memory is in GiB although vendors write GB: an "80 GB" H100 has 80 GiB of HBM, of which the
  driver reports 79.65 GiB (`reported_bytes`; on boards with GDDR and error correction 6 % less than
  printed). The CUDA context takes 1 to 2 GB of that before any tensor (the book, section 1.2).
- A link's rate is NVLink's (Infinity Fabric's), one direction, to all peers together: half the
  printed number. None where there is no such link, or where the number is not known.

Left out: clocks and power limits (no chip holds its peak), PCIe, network cards, CPUs.

    >>> gpu("H100").bf16_flops_per_s
    989400000000000.0
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from playbook_utils.predict._checks import expect_type

__all__ = ["GPUS", "Accelerator", "gpu"]

_GIB, _MIB, _TERA, _GIGA = 2**30, 2**20, 1e12, 1e9
_NVML = "; reported memory: nvidia-smi, thundergolfer.com/blog/nvidia-gpu-memory-capacity (2025)"
_HGX = "; memory, NVLink: NVIDIA HGX platform page"


@dataclass(frozen=True)
class Accelerator:
    """One GPU as its vendor describes it. None: not known, or the chip cannot do it."""

    name: str
    memory_bytes: int  # as printed, a GB taken for a GiB
    bf16_flops_per_s: float | None  # dense; None before Ampere, which has no BF16
    fp8_flops_per_s: float | None  # dense
    memory_bytes_per_s: float | None
    link_bytes_per_s: float | None  # one direction, all links of the chip together
    source: str
    reported_bytes: int | None = None  # what the driver calls total

    @property
    def usable_bytes(self) -> int:
        """Memory as the driver reports it, or as it is printed where that is not known."""
        return self.memory_bytes if self.reported_bytes is None else self.reported_bytes


def _row(
    name: str,
    memory_gib: int,
    bf16_tera: float | None,
    fp8_tera: float | None,
    memory_giga_per_s: float,
    link_giga_per_s: float | None,
    source: str,
    reported_mib: int | None = None,
) -> Accelerator:
    return Accelerator(
        name=name,
        memory_bytes=memory_gib * _GIB,
        bf16_flops_per_s=bf16_tera and bf16_tera * _TERA,
        fp8_flops_per_s=fp8_tera and fp8_tera * _TERA,
        memory_bytes_per_s=memory_giga_per_s * _GIGA,
        link_bytes_per_s=link_giga_per_s and link_giga_per_s * _GIGA,
        source=source + (_NVML if reported_mib else ""),
        reported_bytes=reported_mib and reported_mib * _MIB,
    )


_ROWS = (
    # name, GiB, BF16 and FP8 in T/s, memory and link in GB/s, source, reported MiB
    _row("v100-32gb", 32, None, None, 900, 150, "NVIDIA V100 data sheet (FP16: 125 TFLOP/s)"),
    _row("t4", 16, None, None, 320, None, "NVIDIA T4 data sheet (FP16: 65 TFLOP/s)", 15_360),
    _row("a100-40gb", 40, 312, None, 1555, 300, "NVIDIA A100 data sheet, SXM", 40_960),
    _row("a100-80gb", 80, 312, None, 2039, 300, "NVIDIA A100 data sheet, SXM", 81_920),
    _row("h100-sxm", 80, 989.4, 1978.9, 3350, 450, "NVIDIA H100 data sheet, SXM, halved", 81_559),
    _row("h100-nvl", 94, 835.5, 1670.5, 3900, 300, "NVIDIA H100 data sheet, NVL, halved"),
    _row("h100-pcie", 80, 756, 1513, 2000, 300, "NVIDIA H100 data sheet, PCIe (2023), halved"),
    _row(
        "h800-sxm", 80, 989.4, 1978.9, 3350, 200,
        "as H100 SXM; NVLink 400 GB/s: arXiv:2505.09343, section 4.1",
    ),
    _row("h200", 141, 989.4, 1978.9, 4800, 450, "NVIDIA H200 data sheet, SXM, halved", 143_771),
    _row("b200", 180, 2250, 4500, 8000, 900, "NVIDIA Blackwell data sheet, HGX B200" + _HGX),
    _row("gb200", 186, 2500, 5000, 8000, 900, "NVIDIA GB200 NVL72 page, a 72nd of the rack"),
    _row("mi300x", 192, 1307.4, 2614.9, 5300, 448, "AMD Instinct MI300X data sheet (7 x 64 GB/s)"),
    _row("mi325x", 256, 1307.4, 2614.9, 6000, 448, "AMD Instinct MI325X data sheet (7 x 64 GB/s)"),
    _row("l4", 24, 121, 242, 300, None, "NVIDIA L4 data sheet, halved", 23_034),
    _row("l40s", 48, 362, 733, 864, None, "NVIDIA L40S data sheet", 46_068),
    _row(
        "rtx-3090", 24, 71, None, 936, 56.25,
        "NVIDIA GA102 white paper, appendix A (FP32 accumulation)",
    ),
    _row(
        "rtx-4090", 24, 165.2, 330.3, 1008, None,
        "NVIDIA Ada white paper, appendix A (FP32 accumulation)",
    ),
)  # fmt: skip

GPUS: dict[str, Accelerator] = {row.name: row for row in _ROWS}
"""Every accelerator by its name."""

_ALIASES = {"h100": "h100-sxm", "a100": "a100-80gb", "v100": "v100-32gb", "h800": "h800-sxm"}


def gpu(name: str) -> Accelerator:
    """The accelerator called `name`, in any case ("h100" is the SXM board, "a100" the one of
    80 GB); ValueError that names the known ones."""
    expect_type("the name of a GPU", name, str)
    key = name.strip().lower().replace(" ", "-").replace("_", "-")
    key = _ALIASES.get(key, key)
    if key in GPUS:
        return GPUS[key]
    near = difflib.get_close_matches(key, [*GPUS, *_ALIASES], n=1, cutoff=0.6)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ValueError(f"no GPU is called {name!r}{hint}: expected one of {', '.join(GPUS)}")
