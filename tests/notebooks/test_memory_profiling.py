"""The classes of lesson 01, imported from its cells: other sizes than the lesson's, and what they
must leave alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import playbook_utils  # noqa: F401 (makes `notebooks` importable)
from notebooks.memory_profiling import ByteDropout, GPTBlock, MixedPrecisionAdamW
from playbook_utils.measure import saved_for_backward, state_bytes
from playbook_utils.model import Decoder, DecoderConfig, DecoderLayer, num_params
from playbook_utils.predict.activations import layer_terms
from playbook_utils.predict.shapes import ModelShape

OPTIONS = dict(lr=3e-3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)


def model_of(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def backward(model: nn.Module, seed: int) -> None:
    dtype = next(model.parameters()).dtype
    torch.manual_seed(seed)
    model(torch.randn(4, 7).to(dtype)).square().sum().backward()


def masters(optimizer: MixedPrecisionAdamW) -> list[Tensor]:
    return optimizer.param_groups[0]["params"]


@pytest.mark.parametrize("fp32_grads", [False, True])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_masters_go_where_adamw_goes(fp32_grads: bool, num_microbatches: int) -> None:
    model = model_of()
    ours = MixedPrecisionAdamW(model.parameters(), **OPTIONS)
    copies = [p.detach().float() for p in model.parameters()]
    theirs = torch.optim.AdamW(copies, **OPTIONS)
    for step in range(4):
        model.zero_grad()
        ours.zero_grad()
        sums = [torch.zeros_like(copy) for copy in copies]
        for microbatch in range(num_microbatches):
            backward(model, 10 * step + microbatch)
            if fp32_grads:
                for total, weight in zip(sums, model.parameters(), strict=True):
                    total += weight.grad.float()
                ours.add_gradients()
                model.zero_grad()
        for copy, total, weight in zip(copies, sums, model.parameters(), strict=True):
            copy.grad = total if fp32_grads else weight.grad.float()
        ours.step()
        theirs.step()
    for copy, master, weight in zip(copies, masters(ours), model.parameters(), strict=True):
        torch.testing.assert_close(master, copy, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(weight, master.bfloat16(), rtol=0, atol=0)


def test_small_updates_reach_the_master_and_not_the_rounded_weight() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = MixedPrecisionAdamW([weight], lr=1e-4, weight_decay=0.0)
    for _ in range(10):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.tolist() == [1.0] * 3
    torch.testing.assert_close(masters(optimizer)[0], torch.full((3,), 1 - 10 * 1e-4))


def test_a_scheduler_sets_the_learning_rate() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = MixedPrecisionAdamW([weight], lr=0.5, weight_decay=0.0)
    optimizer.param_groups[0]["lr"] = 0.0  # what every scheduler of PyTorch does
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert masters(optimizer)[0].tolist() == [1.0] * 3


def test_the_master_is_a_copy_also_of_fp32_weights() -> None:
    model = model_of(torch.float32)
    optimizer = MixedPrecisionAdamW(model.parameters())
    assert {m.data_ptr() for m in masters(optimizer)}.isdisjoint(
        p.data_ptr() for p in model.parameters()
    )


def test_frozen_weights_stay_and_have_no_master() -> None:
    model = model_of()
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    optimizer = MixedPrecisionAdamW(model.parameters())
    assert [m.shape for m in masters(optimizer)] == [p.shape for p in model[2].parameters()]
    backward(model, 0)
    optimizer.add_gradients()
    optimizer.step()
    assert torch.equal(model[0].weight, before)
    assert torch.equal(model[2].weight, masters(optimizer)[0].bfloat16())
    trained = sum(p.numel() for p in model[2].parameters())
    assert state_bytes(model, optimizer).total_bytes == 20 * trained + 2 * (7 * 5 + 5)


def test_weights_without_a_gradient_stay_and_get_no_state() -> None:
    used, unused = (nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = MixedPrecisionAdamW([unused, used])
    used.grad = torch.ones_like(used)
    optimizer.add_gradients()
    optimizer.step()
    assert unused.tolist() == [1.0] * 3
    assert [master in optimizer.state for master in masters(optimizer)] == [False, True]


@pytest.mark.parametrize("fp32_grads", [False, True])
def test_zero_grad_clears_the_weights_too(fp32_grads: bool) -> None:
    model = model_of()
    optimizer = MixedPrecisionAdamW(model.parameters())
    backward(model, 0)
    if fp32_grads:
        optimizer.add_gradients()
    optimizer.zero_grad()
    assert [t.grad for t in [*model.parameters(), *masters(optimizer)]] == [None] * 8


def test_a_gradient_is_added_once_and_its_memory_stays() -> None:
    model, alone = model_of(), model_of()
    optimizer = MixedPrecisionAdamW(model.parameters())
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in alone.parameters()]
    for seed in range(3):
        backward(model, seed)
        optimizer.add_gradients()
        alone.zero_grad()
        backward(alone, seed)
        for total, param in zip(sums, alone.parameters(), strict=True):
            total += param.grad.float()
    for total, master, weight in zip(sums, masters(optimizer), model.parameters(), strict=True):
        assert torch.equal(master.grad, total) and master.grad.dtype == torch.float32
        assert weight.grad is not None and not weight.grad.any()


def test_masters_are_no_part_of_the_state_dict() -> None:
    """As its docstring says: two averages and a counter for each weight, and nothing else."""
    model = model_of()
    optimizer = MixedPrecisionAdamW(model.parameters())
    backward(model, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    assert [set(state) for state in saved["state"].values()] == [{"step", "mean", "square"}] * 4
    assert saved["param_groups"][0]["params"] == [0, 1, 2, 3]


@pytest.mark.parametrize(("fp32_grads", "expected"), [(False, 16), (True, 20)])
def test_bytes_a_parameter(fp32_grads: bool, expected: int) -> None:
    model = Decoder(DecoderConfig.tiny(dim=24, ff_dim=40, tied=True)).to(torch.bfloat16)
    optimizer = MixedPrecisionAdamW(model.parameters())
    for _ in range(2):
        model.zero_grad()
        optimizer.zero_grad()
        model(torch.zeros(2, 5, dtype=torch.int64)).float().sum().backward()
        if fp32_grads:
            optimizer.add_gradients()
        optimizer.step()
        assert state_bytes(model, optimizer).total_bytes == expected * num_params(model)


def gpt_shape(dim: int, num_heads: int, dropout: bool) -> ModelShape:
    return ModelShape(
        vocab_size=256, dim=dim, num_layers=1, num_heads=num_heads, num_kv_heads=num_heads,
        ff_dim=4 * dim, norm="layernorm", mlp="gelu", position="learned", bias=True,
        dropout=dropout,
    )  # fmt: skip


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("sizes", [(1, 5, 24, 3), (3, 19, 48, 6), (2, 64, 64, 4)])
def test_the_block_keeps_what_the_terms_say(
    sizes: tuple[int, int, int, int], dropout: float
) -> None:
    batch_size, seq_len, dim, num_heads = sizes
    torch.manual_seed(0)
    block = GPTBlock(dim, num_heads, p=dropout).to(torch.bfloat16)
    x = torch.randn(batch_size, seq_len, dim).to(torch.bfloat16).requires_grad_()
    with saved_for_backward(block) as saved:
        block(x)
    shape, options = gpt_shape(dim, num_heads, dropout > 0), dict(attention="unfused")
    plain = layer_terms(shape, seq_len, batch_size, **options)
    full = layer_terms(shape, seq_len, batch_size, kernels="eager", statistics=True, **options)
    tokens = batch_size * seq_len
    assert saved.total_bytes == sum(term.num_bytes for term in full)
    assert sum(term.num_bytes for term in full) - sum(t.num_bytes for t in plain) == 8 * tokens
    if dropout:
        formula = tokens * (34 * dim + 5 * num_heads * seq_len)
        assert sum(term.num_bytes for term in plain) == formula


def test_the_block_computes_what_the_fused_layer_does_and_its_gradient() -> None:
    torch.manual_seed(0)
    layer = DecoderLayer(DecoderConfig.gpt_tiny(dim=24, num_heads=3)).double()
    block = GPTBlock(24, 3, p=0.0).double()
    weights = layer.state_dict()
    for kind in ("weight", "bias"):
        parts = [weights.pop(f"attention.{name}_proj.{kind}") for name in "qkv"]
        weights[f"qkv.{kind}"] = torch.cat(parts)
        for old, new in (("attention.o", "out"), ("mlp.up", "up"), ("mlp.down", "down")):
            weights[f"{new}.{kind}"] = weights.pop(f"{old}_proj.{kind}")
    block.load_state_dict(weights)
    x = torch.randn(2, 7, 24, dtype=torch.float64).requires_grad_()
    outputs = [layer(x), block(x)]
    grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in outputs]
    torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-8)


def test_dropout_scales_keeps_a_byte_mask_and_rests_in_evaluation() -> None:
    torch.manual_seed(0)
    dropout, x = ByteDropout(0.25), torch.ones(40, 50, requires_grad=True)
    with saved_for_backward() as saved:
        y = dropout(x)
    assert [(t.dtype, t.storage_bytes) for t in saved.tensors] == [("bool", 2000)]
    assert y.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert 0.2 < float((y == 0).float().mean()) < 0.3
    assert dropout.eval()(x) is x and ByteDropout(0.0)(x) is x
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, y.detach())
