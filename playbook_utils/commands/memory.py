"""`playbook memory`: the memory that a rank needs to train a model.

    playbook memory --model llama-3-8b --seq 4096 --dp 8 --zero 1 --gpu h100-sxm
    playbook memory --model path/to/config.json --tp 8 --sp --recompute selective --json

Left out: the prediction itself (`playbook_utils.predict.training`) and its wording
(`answer`). No torch is imported: the answer comes in a fraction of a second.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from playbook_utils.commands.answer import FLAGS, as_json, as_text, with_flags
from playbook_utils.predict.activations import ATTENTIONS, KERNELS, RECOMPUTE
from playbook_utils.predict.hardware import GPUS, gpu
from playbook_utils.predict.hf_config import load_shape, read_config
from playbook_utils.predict.layout import SCHEDULES
from playbook_utils.predict.precision import RECIPES
from playbook_utils.predict.presets import ALIASES, PRESETS
from playbook_utils.predict.shapes import ModelShape
from playbook_utils.predict.training import train

__all__ = ["DESCRIPTION", "add_arguments", "run"]

_DOES_NOT_FIT = 1
DESCRIPTION = (
    "Predict what one rank holds while it trains: parameters, gradients, optimizer states and "
    "activations, in bytes and GiB, of the pipeline stage that needs most. Exits with 0; with 1 "
    "where --gpu names a GPU that this does not fit; with 2 for bad arguments."
)
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
    names = {flag.lstrip("-").replace("-", "_"): name for name, flag in FLAGS.items()}
    fields = {names.get(name, name): value for name, value in vars(arguments).items()}
    others = ("command", "run", "model", "gpu", "json")
    try:
        training = train(shape, **{name: fields[name] for name in fields if name not in others})
    except ValueError as error:
        raise ValueError(with_flags(str(error))) from None
    if arguments.json:
        print(json.dumps(as_json(training, accelerator, ignored), indent=2))
    else:
        print(as_text(training, accelerator))
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
