"""`playbook memory`: the memory of one rank, from a model's shape and how it is trained.

    playbook memory --model llama-3-8b --seq 4096 --dp 8 --zero 1 --gpu h100-sxm
    playbook memory --model path/to/config.json --tp 8 --sp --recompute selective --json

Left out: the prediction itself (`playbook_utils.predict.memory`). No torch is imported: the answer
comes in a fraction of a second.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from playbook_utils.predict.activations import (
    ATTENTIONS,
    KERNELS,
    RECOMPUTE,
    default_attention,
)
from playbook_utils.predict.estimate import CATEGORIES, MOMENTS, MemoryEstimate
from playbook_utils.predict.hardware import GPUS, Accelerator, gpu
from playbook_utils.predict.headroom import NOT_COUNTED, gib_text, headroom_bytes, verdict
from playbook_utils.predict.hf_config import load_shape, read_config
from playbook_utils.predict.layout import SCHEDULES, ParallelLayout
from playbook_utils.predict.memory import predict_memory
from playbook_utils.predict.precision import RECIPES, recipe
from playbook_utils.predict.presets import ALIASES, PRESETS
from playbook_utils.predict.shapes import ModelShape

__all__ = ["Answer", "add_parser", "as_json", "as_text"]

_WIDTH = 96
_DOES_NOT_FIT = 1
_SEQ_LEN = 4096
_DEGREES = (
    ("dp", "data"),
    ("tp", "tensor"),
    ("cp", "context"),
    ("pp", "pipeline"),
    ("ep", "expert"),
)
_FLAGS = {
    "seq_len": "--seq",
    "microbatch_size": "--microbatch",
    "num_microbatches": "--microbatches",
    "virtual_stages": "--virtual-stages",
    "zero_stage": "--zero",
    "sequence_parallel": "--sp",
}
"""Fields that have another name here (dp, tp, ... do not)."""


@dataclass(frozen=True)
class Answer:
    """What was asked, and the estimate; printed by `as_text` or `as_json`."""

    shape: ModelShape
    layout: ParallelLayout
    seq_len: int
    microbatch_size: int
    precision: str
    recompute: str
    attention: str
    kernels: str
    estimate: MemoryEstimate
    gpu: Accelerator | None = None
    ignored_fields: tuple[str, ...] = ()


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's parser."""
    parser = subcommands.add_parser(
        "memory",
        help="the memory that a rank needs to train a model",
        description="Predict what one rank holds while it trains: parameters, gradients, "
        "optimizer states and activations, in bytes and GiB, of the pipeline stage that needs "
        "most. Exits with 0; with 1 where --gpu names a GPU that this does not fit; with 2 for "
        "bad arguments.",
    )
    _add_model_options(parser)
    _add_layout_options(parser)
    parser.add_argument("--gpu", metavar="NAME", help=f"does it fit: {', '.join(GPUS)}")
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    parser.set_defaults(run=_run)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME|FILE",
        help=f"a Hugging Face config.json, or one of {', '.join(PRESETS)}",
    )
    parser.add_argument(
        "--seq",
        type=int,
        metavar="N",
        help=f"tokens ({_SEQ_LEN}, or fewer where a model has fewer learned positions)",
    )
    parser.add_argument("--microbatch", type=int, default=1, metavar="N", help="sequences (1)")
    parser.add_argument("--precision", choices=RECIPES, default="bf16", help="(bf16)")
    parser.add_argument("--recompute", choices=RECOMPUTE, default="none", help="(none)")
    parser.add_argument(
        "--attention",
        choices=ATTENTIONS,
        help="(flash; unfused for models trained with dropout, as the GPT presets)",
    )
    parser.add_argument(
        "--kernels",
        choices=KERNELS,
        default="fused",
        help="norms and SwiGLU as one kernel each, or as PyTorch's own operators, which keep more "
        "(fused)",
    )


def _add_layout_options(parser: argparse.ArgumentParser) -> None:
    for name, what in _DEGREES:
        parser.add_argument(
            f"--{name}", type=int, default=1, metavar="N", help=f"degree of {what} parallelism (1)"
        )
    parser.add_argument("--zero", type=int, choices=range(4), default=0, help="ZeRO stage (0)")
    parser.add_argument("--sp", action="store_true", help="sequence parallelism beside --tp")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="(1f1b)")
    parser.add_argument(
        "--microbatches", type=int, metavar="N", help="in a step (as many as fill the pipeline)"
    )
    parser.add_argument(
        "--virtual-stages", type=int, default=1, metavar="N", help="per rank, interleaved (1)"
    )


def _run(arguments: argparse.Namespace) -> int:
    accelerator = None if arguments.gpu is None else gpu(arguments.gpu)
    shape, ignored = _read_shape(arguments.model)
    try:
        answer = _predict(arguments, shape, accelerator, ignored)
    except ValueError as error:
        raise ValueError(_with_flags(str(error))) from None
    print(json.dumps(as_json(answer), indent=2) if arguments.json else as_text(answer))
    fits = accelerator is None or answer.estimate.fits(accelerator)
    return 0 if fits else _DOES_NOT_FIT


def _with_flags(sentence: str) -> str:
    for name, flag in _FLAGS.items():
        sentence = re.sub(rf"\b{name}\b", flag, sentence)
    return sentence


def _predict(
    arguments: argparse.Namespace,
    shape: ModelShape,
    accelerator: Accelerator | None,
    ignored: tuple[str, ...],
) -> Answer:
    layout = ParallelLayout(
        dp=arguments.dp,
        tp=arguments.tp,
        cp=arguments.cp,
        pp=arguments.pp,
        ep=arguments.ep,
        zero_stage=arguments.zero,
        sequence_parallel=arguments.sp,
        schedule=arguments.schedule,
        num_microbatches=arguments.microbatches,
        virtual_stages=arguments.virtual_stages,
    )
    attention = arguments.attention or default_attention(shape)
    longest = min(_SEQ_LEN, shape.max_seq_len) if shape.position == "learned" else _SEQ_LEN
    how = {
        "seq_len": longest if arguments.seq is None else arguments.seq,
        "microbatch_size": arguments.microbatch,
        "precision": arguments.precision,
        "recompute": arguments.recompute,
        "attention": attention,
        "kernels": arguments.kernels,
    }
    estimate = predict_memory(shape, layout=layout, **how)
    return Answer(shape, layout, estimate=estimate, gpu=accelerator, ignored_fields=ignored, **how)


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


def as_text(answer: Answer) -> str:
    """What was asked, a table of one rank's memory, what it leaves out, and whether it fits."""
    shape, layout, estimate = answer.shape, answer.layout, answer.estimate
    degrees = ", ".join(
        f"{name} {getattr(layout, name)}" for name in ("dp", "tp", "cp", "pp", "ep")
    )
    lines = [
        f"{shape.name or 'model'}: {shape.num_params:,} parameters, {answer.microbatch_size} x "
        f"{answer.seq_len:,} tokens, {answer.precision}, recompute {answer.recompute}, "
        f"{answer.attention} attention, {answer.kernels} kernels",
        f"{_count(layout.world_size, 'rank')}: {degrees}, ZeRO {layout.zero_stage}"
        + (", sequence parallel" if layout.sequence_parallel else ""),
        f"per rank, {_rank_params(answer)}, {_stage(answer)}:",
        "",
    ]
    sizes = {name: getattr(estimate, f"{name}_bytes") for name in (*CATEGORIES, "total")}
    sizes |= {"for a moment": estimate.transient_bytes, "peak": estimate.peak_bytes}
    lines += [
        f"{name.replace('_', ' '):<16}  {size:>22,} bytes  {gib_text(size):>16}"
        for name, size in sizes.items()
    ]
    lines.append("")
    if estimate.transient_bytes:
        lines += _wrapped(f"For a moment: {MOMENTS[estimate.moment]}.")
    lines += _wrapped(f"Not counted: {NOT_COUNTED}.")
    if estimate.gathered_bytes:
        gathered = gib_text(estimate.gathered_bytes)
        lines += _wrapped(
            f"ZeRO-3 gathers up to {gathered} for a moment: not in the total, and in the peak only "
            "if that moment is the worst."
        )
    for note in _notes(answer):
        lines += _wrapped(f"Note: {_with_flags(note)}.")
    if answer.gpu is not None:
        sentence = verdict(estimate, answer.gpu)
        lines.append(f"{sentence[0].upper()}{sentence[1:]}.")
    return "\n".join(lines)


def as_json(answer: Answer) -> dict[str, Any]:
    """The same for programs; sizes in bytes. Keys are only ever added."""
    layout, estimate, accelerator = answer.layout, answer.estimate, answer.gpu
    asked = ("seq_len", "microbatch_size", "precision", "recompute", "attention", "kernels")
    found: dict[str, Any] = {
        "model": {
            "name": answer.shape.name,
            "num_params": answer.shape.num_params,
            "ignored_fields": list(answer.ignored_fields),
        },
        **{name: getattr(answer, name) for name in asked},
        "layout": {**asdict(layout), "world_size": layout.world_size},
        "rank": estimate.as_dict(),
        "not_counted": NOT_COUNTED,
        "notes": list(_notes(answer)),
        "gpu": None,
    }
    if accelerator is not None:
        found["gpu"] = {
            "name": accelerator.name,
            "memory_bytes": accelerator.usable_bytes,
            "fits": estimate.fits(accelerator),
            "left_bytes": headroom_bytes(estimate, accelerator),
        }
    return found


def _notes(answer: Answer) -> tuple[str, ...]:
    notes = answer.layout.notes(answer.shape, answer.seq_len)
    if answer.recompute == "selective" and answer.attention == "flash":
        notes += (
            "recompute selective has no effect with flash attention, which keeps no attention "
            "core and recomputes it by itself",
        )
    return notes


def _rank_params(answer: Answer) -> str:
    """Those it computes with, and of these, under ZeRO-3, those it keeps."""
    computed = answer.estimate.num_params
    kept = answer.estimate.params_bytes // recipe(answer.precision).params_bytes
    return f"{computed:,} parameters" + (f" ({kept:,} of them kept)" if kept < computed else "")


def _stage(answer: Answer) -> str:
    pp, estimate = answer.layout.pp, answer.estimate
    if pp == 1:
        return "the only pipeline stage"
    kept = ", ".join(map(str, estimate.microbatches_in_flight))
    return (
        f"pipeline stage {estimate.stage} of 0 to {pp - 1} (needs most), {kept} micro-batches kept"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ")
