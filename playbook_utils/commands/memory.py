"""`playbook memory`: the memory that a rank needs to train a model.

    playbook memory --model llama-3-8b --seq 4096 --dp 8 --zero 1 --gpu h100-sxm
    playbook memory --model path/to/config.json --tp 8 --sp --recompute selective --json

Left out: the prediction itself (`playbook_utils.predict.training`). No torch is imported: the
answer comes in a fraction of a second.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from playbook_utils.predict.activations import ATTENTIONS, KERNELS, RECOMPUTE
from playbook_utils.predict.estimate import CATEGORIES
from playbook_utils.predict.hardware import GPUS, Accelerator, gpu
from playbook_utils.predict.headroom import NOT_COUNTED, gib_text, headroom_bytes, remarks, verdict
from playbook_utils.predict.hf_config import load_shape, read_config
from playbook_utils.predict.layout import SCHEDULES
from playbook_utils.predict.precision import RECIPES
from playbook_utils.predict.presets import ALIASES, PRESETS
from playbook_utils.predict.shapes import ModelShape
from playbook_utils.predict.training import Training, train

__all__ = ["DESCRIPTION", "add_arguments", "run"]

_DOES_NOT_FIT = 1
DESCRIPTION = (
    "Predict what one rank holds while it trains: parameters, gradients, optimizer states and "
    "activations, in bytes and GiB, of the pipeline stage that needs most. Exits with 0; with 1 "
    "where --gpu names a GPU that this does not fit; with 2 for bad arguments."
)
_WIDTH = 96
_FLAGS = {
    "seq_len": "--seq",
    "microbatch_size": "--microbatch",
    "num_microbatches": "--microbatches",
    "virtual_stages": "--virtual-stages",
    "zero_stage": "--zero",
    "sequence_parallel": "--sp",
}
"""Fields that have another name here (dp, tp, ... do not)."""
_NUMBERS: dict[str, tuple[int | None, str]] = {
    "--seq": (None, "tokens (4096, or fewer where a model has fewer learned positions)"),
    "--microbatch": (1, "sequences (1)"),
    "--dp": (1, "degree of data parallelism (1)"),
    "--tp": (1, "degree of tensor parallelism (1)"),
    "--cp": (1, "degree of context parallelism (1)"),
    "--pp": (1, "degree of pipeline parallelism (1)"),
    "--ep": (1, "degree of expert parallelism (1)"),
    "--microbatches": (None, "in a step (as many as fill the pipeline)"),
    "--virtual-stages": (1, "per rank, interleaved (1)"),
}
_DROPOUT = "(flash; unfused for models trained with dropout, as the GPT presets)"
_FUSED = "norms and SwiGLU as one kernel each, or as PyTorch's operators, which keep more (fused)"
_CHOICES: dict[str, tuple[Iterable[str], str | None, str]] = {
    "--precision": (RECIPES, "bf16", "(bf16)"),
    "--recompute": (RECOMPUTE, "none", "(none)"),
    "--attention": (ATTENTIONS, None, _DROPOUT),
    "--kernels": (KERNELS, "fused", _FUSED),
    "--schedule": (SCHEDULES, "1f1b", "(1f1b)"),
}
"""{option: (values, default, help)}; numbers: {option: (default, help)}."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    model = f"a Hugging Face config.json, or one of {', '.join(PRESETS)}"
    parser.add_argument("--model", required=True, metavar="NAME|FILE", help=model)
    for option, (number, about) in _NUMBERS.items():
        parser.add_argument(option, type=int, default=number, metavar="N", help=about)
    for option, (values, default, about) in _CHOICES.items():
        parser.add_argument(option, choices=values, default=default, help=about)
    parser.add_argument("--zero", type=int, choices=range(4), default=0, help="ZeRO stage (0)")
    parser.add_argument("--sp", action="store_true", help="sequence parallelism beside --tp")
    parser.add_argument("--gpu", metavar="NAME", help=f"does it fit: {', '.join(GPUS)}")
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit status."""
    accelerator = None if arguments.gpu is None else gpu(arguments.gpu)
    shape, ignored = _read_shape(arguments.model)
    names = {flag.lstrip("-").replace("-", "_"): name for name, flag in _FLAGS.items()}
    fields = {names.get(name, name): value for name, value in vars(arguments).items()}
    others = ("command", "run", "model", "gpu", "json")
    try:
        training = train(shape, **{name: fields[name] for name in fields if name not in others})
    except ValueError as error:
        raise ValueError(_with_flags(str(error))) from None
    if arguments.json:
        print(json.dumps(_as_json(training, accelerator, ignored), indent=2))
    else:
        print(_as_text(training, accelerator))
    fits = accelerator is None or training.estimate.fits(accelerator)
    return 0 if fits else _DOES_NOT_FIT


def _read_shape(model: str) -> tuple[ModelShape, tuple[str, ...]]:
    """A preset, or the shape in a file; fields of it that may matter and are not understood are
    named on standard error."""
    path = Path(model)
    is_file = path.suffix == ".json" or path.exists() or len(path.parts) > 1
    if model.strip().lower() in {*PRESETS, *ALIASES} or not is_file:
        return load_shape(model), ()
    shape, ignored = read_config(path)
    if ignored:
        what = f"fields of {model} that are not understood, left out: {', '.join(ignored)}"
        print(f"playbook memory: warning: {what}", file=sys.stderr)
    return shape, ignored


def _with_flags(sentence: str) -> str:
    for name, flag in _FLAGS.items():
        sentence = re.sub(rf"\b{name}\b", flag, sentence)
    return sentence


def _as_text(answer: Training, gpu: Accelerator | None) -> str:
    shape, layout, estimate = answer.shape, answer.layout, answer.estimate
    kept = f"{estimate.num_params:,} parameters"  # those it computes with
    if answer.kept_params < estimate.num_params:
        kept += f" ({answer.kept_params:,} of them kept)"
    axes = ("dp", "tp", "cp", "pp", "ep")
    degrees = "".join(f"{name} {getattr(layout, name)}, " for name in axes)
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
        lines += textwrap.wrap(_with_flags(remark), _WIDTH, subsequent_indent="  ")
    if gpu is not None:
        sentence = verdict(estimate, gpu)
        lines.append(f"{sentence[0].upper()}{sentence[1:]}.")
    return "\n".join(lines)


def _as_json(answer: Training, gpu: Accelerator | None, ignored: Sequence[str]) -> dict[str, Any]:
    # Keys are only ever added.
    layout, estimate = answer.layout, answer.estimate
    return {
        "model": {
            "name": answer.shape.name,
            "num_params": answer.shape.num_params,
            "ignored_fields": list(ignored),
        },
        "seq_len": answer.seq_len,
        "microbatch_size": answer.microbatch_size,
        "precision": answer.recipe.name,
        **{name: getattr(answer, name) for name in ("recompute", "attention", "kernels")},
        "layout": {**asdict(layout), "world_size": layout.world_size},
        "rank": estimate.as_dict(),
        "not_counted": NOT_COUNTED,
        "notes": list(_notes(answer)),
        "gpu": gpu
        and {
            "name": gpu.name,
            "memory_bytes": gpu.usable_bytes,
            "fits": estimate.fits(gpu),
            "left_bytes": headroom_bytes(estimate, gpu),
        },
    }


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
