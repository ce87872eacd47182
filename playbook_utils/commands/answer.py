"""The answer of `playbook memory`: what was asked and predicted, as text or as JSON.

    print(as_text(train(shape, seq_len=4096), gpu("h100-sxm")))

Left out: reading the arguments (`playbook_utils.commands.memory`).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from playbook_utils.predict.estimate import CATEGORIES
from playbook_utils.predict.hardware import Accelerator
from playbook_utils.predict.headroom import NOT_COUNTED, gib_text, headroom_bytes, remarks, verdict
from playbook_utils.predict.training import Training

__all__ = ["FLAGS", "as_json", "as_text", "with_flags"]

_WIDTH = 96
FLAGS = {
    "seq_len": "--seq",
    "microbatch_size": "--microbatch",
    "num_microbatches": "--microbatches",
    "virtual_stages": "--virtual-stages",
    "zero_stage": "--zero",
    "sequence_parallel": "--sp",
}
"""Fields that have another name here (dp, tp, ... do not)."""


def with_flags(sentence: str) -> str:
    """The sentence with fields' names replaced by the command's options."""
    for name, flag in FLAGS.items():
        sentence = re.sub(rf"\b{name}\b", flag, sentence)
    return sentence


def as_text(answer: Training, gpu: Accelerator | None = None) -> str:
    """What was asked, a table of one rank's memory, what it leaves out, and whether it fits."""
    shape, layout, estimate = answer.shape, answer.layout, answer.estimate
    kept = f"{estimate.num_params:,} parameters"  # those it computes with
    if answer.kept_params < estimate.num_params:
        kept += f" ({answer.kept_params:,} of them kept)"
    degrees = "".join(
        f"{name} {getattr(layout, name)}, " for name in ("dp", "tp", "cp", "pp", "ep")
    )
    ranks = "rank" if layout.world_size == 1 else "ranks"
    lines = [
        f"{shape.name or 'model'}: {shape.num_params:,} parameters, {answer.microbatch_size} x "
        f"{answer.seq_len:,} tokens, {answer.recipe.name}, recompute {answer.recompute}, "
        f"{answer.attention} attention, {answer.kernels} kernels",
        f"{layout.world_size:,} {ranks}: {degrees}ZeRO {layout.zero_stage}"
        + (", sequence parallel" if layout.sequence_parallel else ""),
        f"per rank, {kept}, {_stage(answer)}:",
        "",
    ]
    sizes = {name: getattr(estimate, f"{name}_bytes") for name in (*CATEGORIES, "total")}
    sizes |= {"for a moment": estimate.transient_bytes, "peak": estimate.peak_bytes}
    lines += [
        f"{name.replace('_', ' '):<16}  {size:>22,} bytes  {gib_text(size):>16}"
        for name, size in sizes.items()
    ]
    lines.append("")
    for remark in remarks(estimate, _notes(answer)):
        lines += textwrap.wrap(with_flags(remark), _WIDTH, subsequent_indent="  ")
    if gpu is not None:
        sentence = verdict(estimate, gpu)
        lines.append(f"{sentence[0].upper()}{sentence[1:]}.")
    return "\n".join(lines)


def as_json(
    answer: Training, gpu: Accelerator | None = None, ignored_fields: Sequence[str] = ()
) -> dict[str, Any]:
    """The same for programs; sizes in bytes. Keys are only ever added."""
    layout, estimate = answer.layout, answer.estimate
    asked = ("recompute", "attention", "kernels")
    found: dict[str, Any] = {
        "model": {
            "name": answer.shape.name,
            "num_params": answer.shape.num_params,
            "ignored_fields": list(ignored_fields),
        },
        "seq_len": answer.seq_len,
        "microbatch_size": answer.microbatch_size,
        "precision": answer.recipe.name,
        **{name: getattr(answer, name) for name in asked},
        "layout": {**asdict(layout), "world_size": layout.world_size},
        "rank": estimate.as_dict(),
        "not_counted": NOT_COUNTED,
        "notes": list(_notes(answer)),
        "gpu": None,
    }
    if gpu is not None:
        found["gpu"] = {
            "name": gpu.name,
            "memory_bytes": gpu.usable_bytes,
            "fits": estimate.fits(gpu),
            "left_bytes": headroom_bytes(estimate, gpu),
        }
    return found


def _notes(answer: Training) -> tuple[str, ...]:
    notes = answer.layout.notes(answer.shape, answer.seq_len)
    if answer.recompute == "selective" and answer.attention == "flash":
        notes += (
            "recompute selective has no effect with flash attention, which keeps no attention "
            "core and recomputes it by itself",
        )
    return notes


def _stage(answer: Training) -> str:
    pp, estimate = answer.layout.pp, answer.estimate
    if pp == 1:
        return "the only pipeline stage"
    kept = ", ".join(map(str, estimate.microbatches_in_flight))
    return (
        f"pipeline stage {estimate.stage} of 0 to {pp - 1} (needs most), {kept} micro-batches kept"
    )
