"""The decoder against independent references: formulas, naive attention, published sizes."""

from __future__ import annotations

import cmath
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

from playbook_utils.model import (
    Attention,
    Decoder,
    DecoderConfig,
    RMSNorm,
    apply_rope,
    cross_entropy,
    num_params,
    rope_cos_sin,
)
from playbook_utils.predict.presets import preset
from playbook_utils.predict.shapes import LatentAttention, MoEShape

STYLES = {
    "llama": DecoderConfig.tiny(vocab_size=37, dim=24, ff_dim=40),
    "llama tied": DecoderConfig.tiny(vocab_size=37, dim=24, ff_dim=40, tied=True),
    "llama biased": DecoderConfig.tiny(vocab_size=37, dim=24, ff_dim=40, bias=True),
    "gpt": DecoderConfig.gpt_tiny(vocab_size=37, dim=24, num_layers=3),
    "gpt untied": DecoderConfig.gpt_tiny(vocab_size=37, dim=24, tied=False, bias=False),
}
styles = pytest.mark.parametrize("config", STYLES.values(), ids=STYLES.keys())


def build(config: DecoderConfig, dtype: torch.dtype = torch.float64) -> Decoder:
    torch.manual_seed(0)
    return Decoder(config).to(dtype)


def closed_form_num_params(c: DecoderConfig) -> int:
    """Written from the papers' shapes, not from the code."""
    kv_dim = c.dim // c.num_heads * c.num_kv_heads
    attention = 2 * c.dim * c.dim + 2 * c.dim * kv_dim
    mlp = (3 if c.mlp == "swiglu" else 2) * c.dim * c.ff_dim
    biases = (2 * c.dim + 2 * kv_dim) + (c.dim + c.ff_dim * (2 if c.mlp == "swiglu" else 1))
    norm = c.dim * (2 if c.norm == "layernorm" and c.bias else 1)
    layer = attention + mlp + (biases if c.bias else 0) + 2 * norm
    tables = c.vocab_size * c.dim * (1 if c.tied else 2)
    tables += c.max_seq_len * c.dim if c.position == "learned" else 0
    return c.num_layers * layer + norm + tables


@pytest.mark.parametrize(
    ("seq_len", "head_dim", "theta"), [(1, 2, 1e4), (17, 6, 1e4), (5, 16, 5e5)]
)
def test_rope_is_a_complex_rotation(seq_len: int, head_dim: int, theta: float) -> None:
    x = torch.randn(2, 3, seq_len, head_dim, dtype=torch.float64)
    positions = torch.arange(seq_len) + 7
    found = apply_rope(x, rope_cos_sin(positions, head_dim, theta, torch.float64))
    half = head_dim // 2
    as_complex = torch.complex(x[..., :half], x[..., half:])
    for t in range(seq_len):
        for i in range(half):
            turn = cmath.exp(1j * (t + 7) * theta ** (-2 * i / head_dim))
            expected = as_complex[:, :, t, i] * turn
            assert torch.allclose(found[:, :, t, i], expected.real, rtol=0, atol=1e-12)
            assert torch.allclose(found[:, :, t, i + half], expected.imag, rtol=0, atol=1e-12)


def test_rope_scores_depend_on_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(q_at: int, k_at: int) -> float:
        turned = [
            apply_rope(x, rope_cos_sin(torch.tensor([at]), 8, 1e4, torch.float64))
            for x, at in ((q, q_at), (k, k_at))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-12)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-6)


def test_rope_angles_are_not_computed_in_low_precision() -> None:
    positions = torch.tensor([8191])
    found = rope_cos_sin(positions, 64, 5e5, torch.bfloat16).double()
    expected = rope_cos_sin(positions, 64, 5e5, torch.float64)
    # 8,191 rounds to 8,192 in bfloat16: one radian off. Rounded afterwards the error is 2^-9, and
    # float32 angles add 8191 * 2^-24.
    assert (found - expected).abs().max() < 2**-8


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 6), (6, 3), (6, 1)])
def test_attention_equals_naive_softmax_over_repeated_heads(heads: int, kv_heads: int) -> None:
    torch.manual_seed(0)
    config = DecoderConfig.tiny(dim=24, num_heads=heads, num_kv_heads=kv_heads)
    attention = Attention(config).double()
    batch, seq_len, head_dim = 3, 11, config.head_dim
    x = torch.randn(batch, seq_len, config.dim, dtype=torch.float64)
    cos_sin = rope_cos_sin(torch.arange(seq_len), head_dim, 1e4, torch.float64)

    def heads_of(proj: nn.Linear, num: int) -> Tensor:
        return (x @ proj.weight.T).reshape(batch, seq_len, num, head_dim).permute(0, 2, 1, 3)

    q = apply_rope(heads_of(attention.q_proj, heads), cos_sin)
    k = apply_rope(heads_of(attention.k_proj, kv_heads), cos_sin)
    v = heads_of(attention.v_proj, kv_heads)
    k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(head_dim)
    future = torch.ones(seq_len, seq_len, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    mixed = torch.einsum("bhqk,bhkd->bqhd", weights, v).reshape(batch, seq_len, -1)
    expected = mixed @ attention.o_proj.weight.T
    assert torch.allclose(attention(x, cos_sin), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2**-7)]
)
def test_rms_norm_equals_torch(dtype: torch.dtype, rtol: float) -> None:
    """In bfloat16 ours rounds once more than torch's: three roundings of 2^-9 between them."""
    ours, theirs = RMSNorm(33, eps=1e-3).to(dtype), nn.RMSNorm(33, eps=1e-3, dtype=dtype)
    with torch.no_grad():
        ours.weight.normal_()
        theirs.weight.copy_(ours.weight)
    x = torch.randn(4, 5, 33).to(dtype)
    assert ours(x).dtype == dtype
    assert torch.allclose(ours(x), theirs(x), rtol=rtol, atol=0)


@styles
def test_changing_a_token_changes_no_earlier_logits(config: DecoderConfig) -> None:
    model = build(config)
    tokens = torch.randint(0, config.vocab_size, (2, 9))
    before = model(tokens)
    for t in (0, 4, 8):
        changed = tokens.clone()
        changed[:, t] = (changed[:, t] + 1) % config.vocab_size
        after = model(changed)
        assert torch.allclose(before[:, :t], after[:, :t], rtol=0, atol=1e-13)
        assert (before[:, t:] - after[:, t:]).abs().amin(dim=(0, 2)).max() > 0
        assert (before[:, t] - after[:, t]).abs().max() > 1e-6


@styles
def test_positions_of_a_slice(config: DecoderConfig) -> None:
    """One token alone at position p sees nothing else, so only `positions` can tell where it is."""
    model = build(config)
    tokens = torch.randint(0, config.vocab_size, (1, 6))
    assert torch.equal(model(tokens), model(tokens, positions=torch.arange(6)))
    shifted = model(tokens, positions=torch.arange(6) + 3)
    if config.position == "rope":  # only distances count
        assert torch.allclose(model(tokens), shifted, rtol=0, atol=1e-13)
        stretched = model(tokens, positions=5 * torch.arange(6))
        assert not torch.allclose(model(tokens), stretched, rtol=0, atol=1e-9)
    else:
        assert not torch.allclose(model(tokens), shifted, rtol=0, atol=1e-9)


@styles
def test_num_params_closed_form(config: DecoderConfig) -> None:
    assert num_params(Decoder(config)) == closed_form_num_params(config)


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (DecoderConfig(128_256, 4096, 32, 32, 8, 14_336, 8192), 8_030_261_248),  # Llama-3-8B
        (DecoderConfig(128_256, 2048, 16, 32, 8, 8192, 8192, tied=True), 1_235_814_400),  # 3.2-1B
        (DecoderConfig.gpt_tiny(vocab_size=50_257, dim=768, num_layers=12, num_heads=12,
                                max_seq_len=1024), 124_439_808),  # GPT-2 small
        (DecoderConfig.tiny(), 125_248),
        (DecoderConfig.gpt_tiny(), 132_864),
    ],
    ids=["llama-3-8b", "llama-3.2-1b", "gpt-2", "tiny", "gpt_tiny"],
)  # fmt: skip
def test_published_sizes_on_the_meta_device(config: DecoderConfig, published: int) -> None:
    with torch.device("meta"):
        model = Decoder(config)
        logits = model(torch.zeros(2, 8, dtype=torch.int64))
    assert num_params(model) == published
    assert logits.shape == (2, 8, config.vocab_size)


@styles
def test_every_parameter_gets_a_gradient(config: DecoderConfig) -> None:
    model = build(config)
    tokens = torch.arange(config.vocab_size)[None]  # so that each row of the table is used
    cross_entropy(model(tokens), tokens.roll(-1)).backward()
    for name, param in model.named_parameters():
        assert param.grad is not None, name
        assert param.grad.abs().max() > 0, name


def test_gradients_by_finite_differences() -> None:
    config = DecoderConfig.tiny(vocab_size=5, dim=8, num_layers=1, ff_dim=6)
    model = build(config)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(10)  # away from the almost linear start
    tokens = torch.tensor([[1, 4, 2]])
    params = dict(model.named_parameters())

    def loss(*values: Tensor) -> Tensor:
        named = dict(zip(params, values, strict=True))
        return cross_entropy(torch.func.functional_call(model, named, (tokens,)), tokens.roll(-1))

    assert torch.autograd.gradcheck(loss, tuple(params.values()), fast_mode=True)


def test_dropout_acts_in_training_mode_only() -> None:
    config = DecoderConfig.gpt_tiny(vocab_size=37, dim=24, dropout=0.5)
    model, without = build(config), build(DecoderConfig.gpt_tiny(vocab_size=37, dim=24))
    tokens = torch.randint(0, 37, (2, 9))
    assert not torch.equal(model(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), model(tokens))
    assert torch.equal(model(tokens), without(tokens))
    attention = model.train().layers[0].attention  # the weights' own dropout, no other module's
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    assert not torch.equal(attention(x), attention(x))


@styles
def test_same_seed_same_model(config: DecoderConfig) -> None:
    first, second = build(config).state_dict(), build(config).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.manual_seed(1)
    assert not torch.equal(Decoder(config).double().head.weight, first["head.weight"])


def test_initial_scale() -> None:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig.tiny(dim=128, num_layers=8, ff_dim=512, bias=True))
    for name, param in model.named_parameters():
        if param.dim() == 1:
            assert torch.all(param == (0 if name.endswith("bias") else 1)), name
        else:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            expected = 0.02 / 4 if residual else 0.02
            assert param.std().item() == pytest.approx(expected, rel=0.05), name
    loss = cross_entropy(model(torch.randint(0, 256, (4, 32))), torch.randint(0, 256, (4, 32)))
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_tied_head_survives_pickle_and_the_way_from_the_meta_device() -> None:
    config = STYLES["llama tied"]
    copy = pickle.loads(pickle.dumps(build(config)))
    assert copy.head.weight is copy.embedding.weight
    with torch.device("meta"):
        model = Decoder(config)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    assert model.head.weight is model.embedding.weight
    assert num_params(model) == closed_form_num_params(config)
    torch.manual_seed(0)
    copy.float().reset_parameters()
    assert torch.equal(model.head.weight, copy.head.weight)
    assert torch.equal(model.layers[1].mlp.up_proj.weight, copy.layers[1].mlp.up_proj.weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    model = build(STYLES["llama"], dtype)
    tokens = torch.randint(0, 37, (2, 9))
    logits = model(tokens)
    assert logits.dtype == dtype
    loss = cross_entropy(logits, tokens)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    reference = build(STYLES["llama"])(tokens)
    assert cross_entropy(reference, tokens).item() == pytest.approx(loss.item(), rel=1e-2)


def test_cross_entropy_is_minus_log_probability() -> None:
    logits, targets = torch.randn(2, 3, 5, dtype=torch.float64), torch.randint(0, 5, (2, 3))
    probabilities = logits.exp() / logits.exp().sum(-1, keepdim=True)
    expected = -probabilities.gather(-1, targets[..., None]).log().flatten()
    assert torch.allclose(cross_entropy(logits, targets, "none"), expected)
    assert torch.allclose(cross_entropy(logits, targets, "sum"), expected.sum())
    assert torch.allclose(cross_entropy(logits, targets), expected.mean())


def test_heads_may_be_sharded_from_outside() -> None:
    """Two half-attentions add up to the whole, as tensor parallelism will use it."""
    torch.manual_seed(0)
    config = DecoderConfig.tiny(dim=32)
    whole = Attention(config).double()
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    parts = []
    for rank in range(2):
        half = Attention(config).double()
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(whole, name).weight.chunk(2, dim=0)[rank]
            getattr(half, name).weight = nn.Parameter(weight.detach().clone())
        half.o_proj.weight = nn.Parameter(whole.o_proj.weight.chunk(2, dim=1)[rank].detach())
        parts.append(half(x))
    assert torch.allclose(parts[0] + parts[1], whole(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 0}, "dim is 0; use a whole number of at least 1"),
        ({"num_layers": True}, "num_layers is True"),
        ({"vocab_size": 2.0}, "vocab_size is 2.0"),
        ({"dim": 65}, "dim=65, num_heads=4"),
        ({"num_kv_heads": 3}, "num_heads=4, num_kv_heads=3"),
        ({"dim": 12}, "must be even; found 12 / 4 = 3"),
        ({"norm": "batchnorm"}, 'norm is \'batchnorm\'; use "rmsnorm" or "layernorm"'),
        ({"mlp": "relu"}, 'use "swiglu" or "gelu"'),
        ({"position": "alibi"}, 'use "rope" or "learned"'),
        ({"dropout": 1.0}, "dropout is 1.0"),
    ],
)
def test_bad_configs_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        DecoderConfig.tiny(**changes)
    assert message in str(caught.value)


@pytest.mark.parametrize("shape", [(1, 257), (5,), (1, 2, 3)])
def test_bad_tokens_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected \(B, T\) with T at most max_seq_len=256"):
        Decoder(DecoderConfig.tiny())(torch.zeros(shape, dtype=torch.int64))


def test_from_shape_builds_published_models_smaller_where_asked() -> None:
    config = DecoderConfig.from_shape(preset("llama-3-8b"), num_layers=1, vocab_size=64)
    assert (config.dim, config.num_heads, config.num_kv_heads, config.ff_dim) == (
        4096,
        32,
        8,
        14336,
    )
    assert (config.num_layers, config.vocab_size, config.dropout) == (1, 64, 0.0)
    gpt2 = DecoderConfig.from_shape(preset("gpt2"))
    assert gpt2 == DecoderConfig.gpt_tiny(
        vocab_size=50257, dim=768, num_layers=12, num_heads=12, max_seq_len=1024, dropout=0.1
    )
    assert DecoderConfig.from_shape(preset("course-gpt-tiny")) == DecoderConfig.gpt_tiny()
    biased = preset("course-tiny").with_changes(bias=True, qkv_bias=True)
    assert DecoderConfig.from_shape(biased) == DecoderConfig.tiny(bias=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe": MoEShape(4, 2, 8)}, "a Decoder cannot have moe; found in the shape 'odd'"),
        ({"mla": LatentAttention(4, 4, 4, 4), "num_kv_heads": 4}, "cannot have mla"),
        ({"head_dim": 32}, "cannot have head_dim other than dim / num_heads"),
        ({"qk_norm": True, "qkv_bias": True}, "cannot have qk_norm, qkv_bias without bias"),
        ({"mlp": "relu"}, "mlp is 'relu'; use"),
    ],
)
def test_from_shape_refuses_what_a_decoder_cannot_have(
    changes: dict[str, object], message: str
) -> None:
    shape = preset("course-tiny").with_changes(name="odd", **changes)
    with pytest.raises(ValueError, match=message):
        DecoderConfig.from_shape(shape)
