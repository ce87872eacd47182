"""`playbook memory`: the memory of one rank, from a model's shape and how it is trained.

    playbook memory --model llama-3-8b --seq 4096 --dp 8 --zero 1 --gpu h100-sxm
    playbook memory --model path/to/config.json --tp 8 --sp --recompute selective --json

Left out: the prediction itself (`playbook_utils.predict.training`) and its wording
(`answer`). No torch is imported: the answer comes in a fraction of a second.
"""

from __future__ import annotations

import argparse
import json
import sys
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

__all__ = ["add_parser"]

_DOES_NOT_FIT = 1
_DEGREES = (
    ("dp", "data"),
    ("tp", "tensor"),
    ("cp", "context"),
    ("pp", "pipeline"),
    ("ep", "expert"),
)


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
        help="tokens (4096, or fewer where a model has fewer learned positions)",
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
