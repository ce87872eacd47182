"""One training run, written down step by step so that another can be held against it.

    record = record_training(model, batches)                  # plain: cross entropy, SGD
    record = record_training(NaiveDDP(model), my_batches)     # a wrapper, on each rank
    record.steps[0].grads["head.weight"]

Left out: the comparison (`checks.equivalence`), and models of which a rank holds only some
parameters (pipeline stages). All is kept in memory: meant for a few steps of a small model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from playbook_utils.model import cross_entropy

__all__ = ["StepRecord", "TrainingRecord", "record_training"]

Step = Callable[[Any, Any], Tensor]
"""step(model, batch) -> loss: forward and backward, after which all gradients are final."""
Gather = Callable[[str, Tensor], Tensor]
"""gather(name, shard) -> the whole tensor."""
Clip = float | Callable[[Any], Tensor | float]
"""A maximum norm, or clip(model) -> norm before clipping."""
Groups = tuple[tuple[str, ...], ...]
"""Names of parameters, grouped."""


@dataclass(frozen=True)
class StepRecord:
    """One training step on one rank; tensors are copies on the CPU."""

    loss: float
    num_tokens: int
    """Targets in the batch that this rank was given; 0 where the batch does not tell."""
    grads: dict[str, Tensor | None]
    """By parameter name, when final, before clipping; None where there is none."""
    grad_norm: float
    """L2 norm over all gradients before clipping, tied ones counted once."""
    params: dict[str, Tensor]
    """After the optimizer's step."""
    tied: Groups
    """Names that are one parameter in memory, after the step."""


@dataclass(frozen=True)
class TrainingRecord:
    """A run of some steps on one rank, picklable."""

    initial: dict[str, Tensor]
    frozen: tuple[str, ...]
    """Names of the parameters that require no gradient."""
    tied: Groups
    """Names that are one parameter in memory, before the first step."""
    steps: tuple[StepRecord, ...]


def record_training(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    step: Step | None = None,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    clip: Clip | None = None,
    rename: Callable[[str], str] | None = None,
    gather: Gather | None = None,
) -> TrainingRecord:
    """Train `model` on `batches`, one step each, and record everything.

    Args:
        step: forward and backward of one batch, returns the loss. By default the cross entropy of
            `model(tokens)`, `backward()`, and `model.finish_gradients()` where it has that method.
        optimizer: makes the optimizer from the trainable parameters. By default SGD with momentum:
            Adam divides by the gradient's own size, which hides a wrong scale and blows the
            rounding noise of a zero gradient up to a full step.
        clip: a maximum norm, or the technique's own clipping: clips in place, returns the norm.
        rename: from the model's parameter names to the reference's. By default the prefix that all
            names share is dropped, so that a wrapper's "module.head.weight" is "head.weight".
        gather: from (name, shard) to the whole tensor, for parameters and gradients of techniques
            that shard them; PyTorch's DTensors are gathered without it.

    Gradients are cleared by `model.zero_grad()`, which a wrapper with its own buffers overrides.

    Raises:
        ValueError: the model has no parameters, or `rename` maps two names to one.
    """
    names = _names(model, rename)
    trainable = [param for param in model.parameters() if param.requires_grad]
    make_optimizer = optimizer or (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    stepper = make_optimizer(trainable)
    initial = {name: _copy(name, param, gather) for name, param in names.items()}
    frozen = tuple(name for name, param in names.items() if not param.requires_grad)
    tied, steps = _tied(names), []
    for batch in batches:
        model.zero_grad()
        loss = torch.as_tensor((step or _plain_step)(model, batch))
        names = _names(model, rename)  # anew: the technique may have replaced a parameter
        grads = {
            name: None if param.grad is None else _copy(name, param.grad, gather)
            for name, param in names.items()
        }
        norm = _clip(model, trainable, clip, grads, _tied(names))
        stepper.step()
        params = {name: _copy(name, param, gather) for name, param in names.items()}
        steps.append(
            StepRecord(float(loss.detach()), _num_tokens(batch), grads, norm, params, _tied(names))
        )
    return TrainingRecord(initial, frozen, tied, tuple(steps))


def _plain_step(model: nn.Module, batch: Any) -> Tensor:
    tokens, targets = batch
    loss = cross_entropy(model(tokens), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    getattr(model, "finish_gradients", lambda: None)()
    return loss


def _names(model: nn.Module, rename: Callable[[str], str] | None) -> dict[str, nn.Parameter]:
    """All parameters by the reference's names; a tied one appears under each of its names."""
    named = dict(model.named_parameters(remove_duplicate=False))
    if not named:
        raise ValueError("the model has no parameters: there is nothing to train or compare")
    if rename is None:
        paths = [name.split(".") for name in named]
        shared = 0
        while all(len(path) > shared + 1 and path[shared] == paths[0][shared] for path in paths):
            shared += 1
        return {".".join(name.split(".")[shared:]): param for name, param in named.items()}
    renamed = {rename(name): param for name, param in named.items()}
    if len(renamed) < len(named):
        raise ValueError(
            f"rename makes {len(renamed)} names of {len(named)} parameters; "
            "each parameter needs a name of its own"
        )
    return renamed


def _tied(names: dict[str, nn.Parameter]) -> Groups:
    """Names with the same memory; neighbours in one flat buffer are not tied."""
    groups: list[tuple[Tensor, list[str]]] = []
    for name, param in names.items():
        local = param.to_local() if hasattr(param, "to_local") else param
        # Not by address: that is 0 for all whose memory was freed between steps.
        for first, group in groups:
            if first is local or (local.numel() and local.is_set_to(first)):
                group.append(name)
                break
        else:
            groups.append((local, [name]))
    return tuple(tuple(group) for _, group in groups if len(group) > 1)


def _copy(name: str, tensor: Tensor, gather: Gather | None) -> Tensor:
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):  # a DTensor: this communicates, on all ranks alike
        tensor = tensor.full_tensor()
    return (tensor if gather is None else gather(name, tensor)).to("cpu", copy=True)


def _clip(
    model: nn.Module,
    trainable: list[nn.Parameter],
    clip: Clip | None,
    grads: dict[str, Tensor | None],
    tied: Groups,
) -> float:
    """Clip as asked; the norm that the clipping saw, or else that of the recorded gradients."""
    if callable(clip):
        return float(clip(model))
    if clip is not None:
        norm = torch.nn.utils.clip_grad_norm_(trainable, clip)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    again = {name for group in tied for name in group[1:]}
    counted = [grad for name, grad in grads.items() if grad is not None and name not in again]
    return math.sqrt(math.fsum(float(grad.double().square().sum()) for grad in counted))


def _num_tokens(batch: Any) -> int:
    """Targets in (tokens, targets, ...), or in a list of such microbatches; -100 is none."""
    if not isinstance(batch, (tuple, list)):
        return 0
    if len(batch) > 1 and isinstance(batch[1], Tensor):
        return int((batch[1] != -100).sum())
    return sum(map(_num_tokens, batch))
