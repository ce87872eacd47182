"""Exercises of lesson 01, memory: what is asked, and how an answer is checked.

    check(COUNT_PARAMS, count_params)

Every answer is held against a real model at odd sizes: its parameters, what its optimizer holds,
what its forward pass keeps, what its peak is. Where a formula is asked for, building the model is
no answer, and where few runs are the point, runs are counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from playbook_utils.checks import Exercise, expect_close, expect_equal
from playbook_utils.data import Batch, GeneratedLanguage
from playbook_utils.errors import CheckFailed
from playbook_utils.measure import saved_for_backward, state_bytes, track_memory
from playbook_utils.model import Decoder, DecoderConfig, cross_entropy, num_params

__all__ = ["COUNT_PARAMS", "EVALUATE", "LARGEST_MICROBATCH", "SAVED_BYTES", "TRAINING_BYTES"]


def _verify_count_params(attempt: Callable[[DecoderConfig], Any]) -> None:
    odd: dict[str, Any] = dict(vocab_size=97, dim=24, num_layers=3, num_heads=6, ff_dim=40)
    billion: dict[str, Any] = dict(vocab_size=128_256, dim=2048, num_layers=16, ff_dim=8192)
    for config, hint in (
        (
            DecoderConfig(**odd, num_kv_heads=6),
            "embedding and head, and per layer 4 attention matrices, 3 of the MLP, 2 norms",
        ),
        (
            DecoderConfig(**odd, num_kv_heads=2),
            "keys and values have num_kv_heads heads, of dim / num_heads each",
        ),
        (DecoderConfig(**odd, num_kv_heads=2, tied=True), "a tied head is the embedding: once"),
        (
            DecoderConfig(**billion, num_heads=32, num_kv_heads=8, tied=True),
            "this is Llama 3.2 1B: was something left out that is small in the other cases?",
        ),
    ):
        with torch.device("meta"):
            expected = num_params(Decoder(config))
        with _no_model_built():
            found = attempt(config)
        names = "vocab_size, dim, num_layers, num_heads, num_kv_heads, ff_dim, tied"
        sizes = ", ".join(f"{name}={getattr(config, name)}" for name in names.split(", "))
        expect_equal(found, expected, f"parameters of {sizes}", hint=hint)


@contextmanager
def _no_model_built() -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise CheckFailed(
            "a model was built: found nn.Module, expected arithmetic\n"
            "hint: the formula must work before there is memory for the model"
        )

    with mock.patch.object(nn.Module, "__init__", refuse):
        yield


def _verify_training_bytes(attempt: Callable[[int, int, bool, int], Any]) -> None:
    for weight_bytes, fp32_grads, moments, hint in (
        (4, False, 2, "FP32: weight, gradient, two moments, 4 bytes each"),
        (4, False, 0, "SGD without momentum keeps nothing of its own"),
        (2, False, 2, "2-byte weights have a 4-byte master copy; moments stay 4 bytes"),
        (2, True, 2, "FP32 gradients come on top of the 2-byte ones that backward makes"),
        (2, True, 1, "SGD with momentum keeps one moment, and the master copy is still there"),
        (2, False, 0, "the master copy is there without any moment"),
        (4, True, 1, "the gradients are FP32 already: there is no second set"),
    ):
        expected, count = _measured_training_bytes(weight_bytes, fp32_grads, moments)
        what = f"training_bytes({count}, {weight_bytes}, {fp32_grads}, {moments})"
        expect_equal(attempt(count, weight_bytes, fp32_grads, moments), expected, what, hint=hint)


def _measured_training_bytes(weight_bytes: int, fp32_grads: bool, moments: int) -> tuple[int, int]:
    """(what a module holds after one step, its parameters), Adam's step counters left out."""
    dtype = torch.float32 if weight_bytes == 4 else torch.bfloat16
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).to(dtype)
    params = list(model.parameters())
    own = [p if weight_bytes == 4 else nn.Parameter(p.detach().float()) for p in params]
    optimizer: torch.optim.Optimizer
    if moments == 2:
        optimizer = torch.optim.AdamW(own)
    else:
        optimizer = torch.optim.SGD(own, lr=0.1, momentum=0.9 * moments)
    model(torch.ones(2, 7, dtype=dtype)).sum().backward()
    for low, high in zip(params, own, strict=True):
        assert low.grad is not None
        high.grad = low.grad.to(high.dtype)
    optimizer.step()
    if not fp32_grads and weight_bytes == 2:
        optimizer.zero_grad()
    counters = 4 * len(own) if moments == 2 else 0
    return state_bytes(model, optimizer).total_bytes - counters, num_params(model)


class _ReluBlock(nn.Module):
    """GPT's block with ReLU, without dropout, its attention not fused."""

    def __init__(self, dim: int, num_heads: int, ff_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, ff_dim), nn.Linear(ff_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )  # (B, H, T, K) each
        weights = (q @ k.transpose(-2, -1)).softmax(-1)  # (B, H, T, T)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(torch.relu(self.up(self.mlp_norm(x))))
        return out


def _verify_saved_bytes(attempt: Callable[[int, int, int, int, int], Any]) -> None:
    for sizes, hint in (
        (
            (16, 1, 64, 1, 256),
            "operator by operator: two pairs share a tensor, softmax's output with what the mix "
            "reads, and ReLU's output with the input of the next matrix",
        ),
        ((16, 3, 64, 1, 256), "three sequences keep three times as much"),
        ((48, 1, 64, 4, 256), "each head has its own weights, s for each token"),
        ((19, 2, 48, 6, 112), "the MLP is not always four times as wide"),
    ):
        seq_len, batch_size, dim, num_heads, ff_dim = sizes
        block = _ReluBlock(dim, num_heads, ff_dim).to(torch.bfloat16)
        x = torch.zeros(batch_size, seq_len, dim, dtype=torch.bfloat16, requires_grad=True)
        with saved_for_backward(block) as saved:
            block(x)
        with _no_model_built():
            found = attempt(*sizes)
        what = "saved_bytes(seq_len={}, batch_size={}, dim={}, num_heads={}, ff_dim={})"
        expect_equal(found, saved.total_bytes, what.format(*sizes), hint=hint)


_MOST_RUNS = 4


@functools.cache
def _peak_bytes(microbatch_size: int) -> int:
    """Peak of the second step of a small model; the first has no optimizer states yet."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig.tiny(num_layers=1, dim=32, ff_dim=88))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    language = GeneratedLanguage()
    with track_memory(model, optimizer) as memory:
        for step in range(2):
            tokens, targets = language.batch(step, microbatch_size, seq_len=32)
            with memory.step():
                cross_entropy(model(tokens), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
    return memory.peak.total_bytes


def _verify_largest_microbatch(attempt: Callable[[Callable[[int], int], int], Any]) -> None:
    each = _peak_bytes(24) - _peak_bytes(23)
    for budget_bytes, expected, hint in (
        (_peak_bytes(23) + each // 2, 23, "fixed part + microbatch x bytes a sequence <= budget"),
        (_peak_bytes(16), 16, "a budget that is exactly reached is enough"),
        (_peak_bytes(32) - 1, 31, "one byte too few is too few: round down"),
        (_peak_bytes(1) // 4, 0, "where not even one sequence fits, the answer is 0"),
    ):
        runs: list[int] = []

        def measured(microbatch_size: int, runs: list[int] = runs) -> int:
            if type(microbatch_size) is not int or not 1 <= microbatch_size <= 64:
                raise CheckFailed(
                    f"peak_bytes({microbatch_size}) was asked for; expected 1 to 64 sequences\n"
                    "hint: measure at two moderate sizes, such as 8 and 16"
                )
            runs.append(microbatch_size)
            if len(runs) > _MOST_RUNS:
                raise CheckFailed(
                    f"found more than {_MOST_RUNS} runs, of {runs} sequences; expected at most "
                    f"{_MOST_RUNS}\nhint: memory is linear in the microbatch: two runs say all"
                )
            return _peak_bytes(microbatch_size)

        what = f"largest microbatch within {budget_bytes:,} bytes"
        expect_equal(attempt(measured, budget_bytes), expected, what, hint=hint)


def _verify_evaluate(attempt: Callable[[nn.Module, list[Batch]], Any]) -> None:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig.gpt_tiny(dropout=0.5)).train()
    # One batch is a single row, so that the mean over batches is not the mean over all rows.
    batches = [GeneratedLanguage().batch(i, n, seq_len=17) for i, n in enumerate((3, 1, 3))]
    with torch.no_grad():
        model.eval()
        losses = [float(cross_entropy(model(tokens), targets)) for tokens, targets in batches]
        model.train()
    # enable_grad's end undoes what the attempt leaves switched off.
    with torch.enable_grad(), saved_for_backward(model) as saved:
        found = attempt(model, batches)
        still_recording = torch.is_grad_enabled()
    hint = "torch.no_grad(): nobody calls backward here, so nothing needs to be kept"
    expect_equal(saved.total_bytes, 0, "bytes kept for a backward pass", hint=hint)
    kind = type(found).__name__
    expect_equal(kind, "float", "type of the result", hint=".item() makes a number of a tensor")
    hint = (
        "the mean over the batches, one forward for each, with dropout switched off: model.eval()"
    )
    expect_close(found, sum(losses) / len(losses), "mean loss", rtol=1e-5, hint=hint)
    hint = "training goes on afterwards: model.train() switches every module inside as well"
    resting = [name or "model" for name, module in model.named_modules() if not module.training]
    expect_equal(resting, [], "modules still in evaluation mode afterwards", hint=hint)
    hint = "a `with torch.no_grad():` ends with its block; set_grad_enabled(False) stays"
    expect_equal(still_recording, True, "torch.is_grad_enabled() afterwards", hint=hint)


COUNT_PARAMS = Exercise(
    "count_params",
    "parameters of a Llama-style model from its configuration alone",
    _verify_count_params,
)
TRAINING_BYTES = Exercise(
    "training_bytes",
    "bytes of weights, gradients and optimizer states for a recipe",
    _verify_training_bytes,
)
SAVED_BYTES = Exercise(
    "saved_bytes",
    "bytes that a block with ReLU and without dropout keeps for backward",
    _verify_saved_bytes,
)
LARGEST_MICROBATCH = Exercise(
    "largest_microbatch",
    "the largest microbatch within a budget, from at most four runs",
    _verify_largest_microbatch,
)
EVALUATE = Exercise(
    "evaluate",
    "the mean loss over batches, with nothing kept in memory",
    _verify_evaluate,
)
