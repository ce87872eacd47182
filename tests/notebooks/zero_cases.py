"""What the tests of lesson 07 share: its stages, models that are hard to cut, and the judge."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import playbook_utils  # noqa: F401 (makes `notebooks` importable)
from notebooks.data_parallelism import broadcast_from_rank_0
from notebooks.zero import (
    ZeRO1,
    ZeRO1AllReduce,
    ZeRO2,
    ZeRO2Overlapped,
    ZeRO3,
    ZeRO3Prefetch,
    clip_shards,
    whole_params,
)
from playbook_utils import workers
from playbook_utils.data import GeneratedLanguage, microbatches, shard_batch
from playbook_utils.model import Decoder, DecoderConfig, cross_entropy

RUNGS: dict[str, Any] = {
    "ZeRO1AllReduce": ZeRO1AllReduce,
    "ZeRO1": ZeRO1,
    "ZeRO2": ZeRO2,
    "ZeRO3": ZeRO3,
}
VARIANTS: dict[str, Any] = {
    "ZeRO2, overlapped": ZeRO2Overlapped,
    "ZeRO2, one unit": partial(ZeRO2, layers=()),
    "ZeRO3, prefetch": ZeRO3Prefetch,
}
WRAPS = RUNGS | VARIANTS
STAGES = {"ZeRO1AllReduce": 1, "ZeRO1": 1, "ZeRO2": 2, "ZeRO3": 3}
MESSAGES = {  # of one step
    "ZeRO1AllReduce": ("all_reduce", "all_gather"),
    "ZeRO1": ("reduce_scatter", "all_gather"),
    "ZeRO2": ("reduce_scatter", "all_gather"),
    "ZeRO3": ("all_gather", "all_gather", "reduce_scatter"),
}
LANGUAGE = GeneratedLanguage(vocab_size=65)
BATCHES = [LANGUAGE.batch(step, batch_size=24, seq_len=7) for step in range(5)]

# Two threads a rank, four ranks and two cores: they would wait for each other.
launch = partial(workers.launch, threads=1)

Maker = Callable[..., nn.Module]


def odd(dtype: torch.dtype = torch.float64) -> nn.Module:
    """11,011 parameters, odd in every layer; GPT's blocks, with biases."""
    sizes = {"dim": 20, "ff_dim": 37, "num_heads": 2, "num_kv_heads": 1, "num_layers": 3}
    changes = {"vocab_size": 65, "max_seq_len": 9, "tied": False}
    return Decoder(DecoderConfig.gpt_tiny(**sizes, **changes)).to(dtype)


def special(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Tied embedding and head, a frozen layer, and a frozen part of another."""
    sizes = {"dim": 20, "ff_dim": 37, "num_heads": 2, "num_kv_heads": 1, "num_layers": 3}
    model = Decoder(DecoderConfig.tiny(**sizes, vocab_size=65, tied=True)).to(dtype)
    model.layers[0].mlp.requires_grad_(False)
    model.layers[1].requires_grad_(False)
    return model


def frozen_embedding(dtype: torch.dtype = torch.float64) -> nn.Module:
    """The root's gradients, of the last norm and the head, are done before all layers."""
    return _freeze(odd(dtype), lambda name: "embedding" in name or "positions" in name)


def partly_frozen(dtype: torch.dtype = torch.float64) -> nn.Module:
    """In each layer something else is trained, and nothing in the root."""
    trained = ("layers.0.mlp", "layers.1.attention", "layers.2.mlp_norm")
    return _freeze(odd(dtype), lambda name: not name.startswith(trained))


class Checkpointed(Decoder):
    """Computes its layers once more in backward."""

    use_reentrant = False

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, None, use_reentrant=self.use_reentrant)
        logits: Tensor = self.head(self.norm(x))
        return logits


class CheckpointedReentrant(Checkpointed):
    """By the older form."""

    use_reentrant = True


def checkpointed(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Activation recomputation in a model without a root: only its layers are trained."""
    model = Checkpointed(odd(dtype).config).to(dtype)
    return _freeze(model, lambda name: not name.startswith("layers"))


def checkpointed_whole(dtype: torch.dtype = torch.float64) -> nn.Module:
    return _freeze(Checkpointed(odd(dtype).config).to(dtype), lambda name: "positions" in name)


def checkpointed_reentrant(dtype: torch.dtype = torch.float64) -> nn.Module:
    model = CheckpointedReentrant(odd(dtype).config).to(dtype)
    return _freeze(model, lambda name: "positions" in name)


def _freeze(model: nn.Module, frozen: Callable[[str], bool]) -> nn.Module:
    for name, param in model.named_parameters():
        param.requires_grad_(not frozen(name))
    assert 0 < sum(p.requires_grad for p in model.parameters()) < len(list(model.parameters()))
    return model


@cache
def alone(make_model: Maker, max_norm: float | None = None) -> Any:
    """Losses, norms before clipping, and weights of one process with the whole batches."""
    torch.manual_seed(0)
    model = make_model()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses, norms = torch.optim.AdamW(trainable, lr=1e-2), [], []
    for tokens, targets in BATCHES:
        optimizer.zero_grad()
        loss = cross_entropy(model(tokens), targets)
        loss.backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in trainable]).item())
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(trainable, max_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


class Trained:
    """A rung and its model on this rank, trained a step at a time."""

    def __init__(self, wrap: Any, make_model: Maker, group: Any = None, seed: int = 0) -> None:
        torch.manual_seed(seed + dist.get_rank(group))  # ranks start differently on purpose
        self.model, self.group = make_model(), group
        broadcast_from_rank_0(self.model, group)
        self.rung = wrap(self.model, group=group)

    def backward(self, batch: Any, parts: int = 1) -> float:
        """Backward of this rank's slice in `parts` microbatches; its mean loss."""
        rank, world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        total = 0.0
        for tokens, targets in microbatches(shard_batch(batch, rank, world_size), parts):
            loss = cross_entropy(self.model(tokens), targets) / parts
            loss.backward()
            total += loss.item()
        self.rung.finish_gradients()
        return total

    def step(self, max_norm: float | None = None) -> float | None:
        """Clip and step; the norm before clipping."""
        norm = None
        if max_norm is not None:
            grads = [unit.grad for unit in self.rung.units]
            norm = float(clip_shards(grads, max_norm, self.group))
        self.rung.step()
        return norm

    def params(self) -> dict[str, Tensor]:
        return whole_params(self.model, self.rung)


def train_all(wraps: dict[str, Any], make_model: Maker, parts: int, max_norm: Any = None) -> Any:
    """{name: (losses, norms, weights)} after five steps."""
    found = {}
    for name, wrap in wraps.items():
        one, losses, norms = Trained(wrap, make_model), [], []
        for batch in BATCHES:
            losses.append(one.backward(batch, parts))
            norms.append(one.step(max_norm))
        found[name] = losses, norms, one.params()
    return found


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        size = max(float(value.abs().max()), 1e-3)  # a bias of k has no gradient but for rounding
        assert (found[name] - value).abs().max() < 1e-10 * size, name
