"""A model's shape from its Hugging Face `config.json`.

Absent fields take the defaults of that model type's class in transformers; the sizes that make a
model (vocabulary, width, layers, heads, feed-forward) must be there. What cannot be right is
refused by name. What is not understood, and may change the shape or its cost, is returned by
name: the caller decides whether to go on. Among those are DeepSeek-V3's multi-token-prediction
layer (`num_nextn_predict_layers`, about 14 billion parameters that no count here has) and sliding
windows (FLOPs are those of full attention).

    shape, ignored = read_config("config.json")
    shape = load_shape("llama-3-8b")              # a preset, or the path of a config.json

Left out: other model types, encoders, vision towers (`text_config`), adapters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from playbook_utils.predict.config_fields import IRRELEVANT, Fields, printable, short
from playbook_utils.predict.layers import LatentAttention, MoEShape
from playbook_utils.predict.presets import ALIASES, PRESETS, preset
from playbook_utils.predict.shapes import ModelShape

__all__ = ["MODEL_TYPES", "load_shape", "read_config"]

_SILU = {"silu": "swiglu", "swish": "swiglu"}
_GPT2_MLP = {
    **dict.fromkeys(("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu"),
    "relu": "relu",
}


def read_config(source: str | Path | Mapping[str, Any]) -> tuple[ModelShape, tuple[str, ...]]:
    """The shape, and the names of fields that were ignored although they may change it.

    Args:
        source: the configuration as a dict, or the path of a `config.json` or of its folder.

    Raises:
        ValueError: names the field, what was found and what was expected.
    """
    values = source if isinstance(source, Mapping) else _load(Path(source))
    fields = Fields(values)
    model_type = fields.value("model_type")
    if not isinstance(model_type, str) or model_type not in _READERS:
        found = "missing" if model_type is None else short(model_type)
        raise ValueError(f"model_type is {found}: expected one of {', '.join(MODEL_TYPES)}")
    _refuse(fields, "is_encoder_decoder")
    if pruned := fields.value("pruned_heads"):
        raise ValueError(f"pruned_heads is {short(pruned)}: expected none, all layers are alike")
    sizes = _READERS[model_type](fields)
    origin = values.get("_name_or_path")
    name = printable(Path(origin).name) if isinstance(origin, str) else ""
    shape = ModelShape(**sizes, name=name or model_type)
    ignored = [*_cost_fields(fields), *fields.unused]
    return shape, tuple(
        printable(name) for name in ignored if name not in IRRELEVANT and not name.startswith("_")
    )


def load_shape(name_or_path: str | Path) -> ModelShape:
    """A preset by its name, or else the `config.json` at that path."""
    text = str(name_or_path)
    key = text.strip().lower()
    if key in PRESETS or key in ALIASES:
        return preset(key)
    path = Path(name_or_path)
    if path.exists() or path.suffix == ".json" or len(path.parts) > 1:
        return read_config(path)[0]
    try:
        return preset(text)
    except ValueError as error:
        raise ValueError(f"{error}; no file of that name either") from None


def _load(path: Path) -> Mapping[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"no file {str(path)!r}: expected the path of a config.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{str(path)!r} holds a {type(values).__name__}: expected a JSON object")
    return values


def _cost_fields(fields: Fields) -> list[str]:
    """Fields that are understood, are not part of a shape, and still change what a step costs."""
    found = []
    windows = fields.value("sliding_window"), fields.flag("use_sliding_window", True)
    if all(windows):
        found.append("sliding_window")
    kinds = fields.value("layer_types") or []
    if not isinstance(kinds, list):
        raise ValueError(f"layer_types is {short(kinds)}: expected a list of names")
    if any(kind != "full_attention" for kind in kinds):
        found.append("layer_types")
    if fields.value("num_nextn_predict_layers"):
        found.append("num_nextn_predict_layers")
    if fields.probability("attention_dropout", 0.0):
        found.append("attention_dropout")
    return found


def _llama_like(
    fields: Fields, kv_heads: int | None = None, head_dim: int = 0, max_seq_len: int = 2048
) -> dict[str, Any]:
    """Fields that all types but GPT-2 share, with the defaults in which they differ."""
    dim, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    num_kv_heads = fields.size("num_key_value_heads", default=kv_heads or num_heads)
    head_dim = fields.size("head_dim", default=head_dim)
    _divides("num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
    if not head_dim:
        _divides("hidden_size", dim, "num_attention_heads", num_heads)
    return {
        "vocab_size": fields.size("vocab_size"),
        "dim": dim,
        "num_layers": fields.size("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "ff_dim": fields.size("intermediate_size"),
        "max_seq_len": fields.size("max_position_embeddings", default=max_seq_len),
        "mlp": fields.choice("hidden_act", choices=_SILU, default="silu"),
        "tied": fields.flag("tie_word_embeddings", default=False),
    }


def _llama(fields: Fields) -> dict[str, Any]:
    biases = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    if biases[0] != biases[1]:
        raise ValueError(
            f"attention_bias is {biases[0]} and mlp_bias is {biases[1]}: expected both or neither "
            "(a ModelShape has biases in all projections, or in queries, keys and values alone)"
        )
    return {**_llama_like(fields), "bias": biases[0]}


def _mistral(fields: Fields) -> dict[str, Any]:
    return _llama_like(fields, kv_heads=8, max_seq_len=131072)


def _mixtral(fields: Fields) -> dict[str, Any]:
    sizes = _mistral(fields)
    num_experts = fields.size("num_local_experts", "num_experts")
    moe = MoEShape(
        num_experts=num_experts,
        experts_per_token=fields.size("num_experts_per_tok", maximum=num_experts),
        expert_ff_dim=sizes["ff_dim"],
    )
    return {**sizes, "moe": moe}


def _qwen2(fields: Fields) -> dict[str, Any]:
    return {**_llama_like(fields, kv_heads=32, max_seq_len=32768), "qkv_bias": True}


def _qwen3(fields: Fields) -> dict[str, Any]:
    _refuse(fields, "attention_bias")
    sizes = _llama_like(fields, kv_heads=32, head_dim=128, max_seq_len=32768)
    return {**sizes, "qk_norm": True}


def _deepseek_v3(fields: Fields) -> dict[str, Any]:
    _refuse(fields, "attention_bias")
    # This model does not use head_dim, with which some files repeat qk_rope_head_dim.
    sizes = {**_llama_like(fields, head_dim=1, max_seq_len=4096), "head_dim": 0}
    if sizes["num_kv_heads"] != sizes["num_heads"]:
        raise ValueError(
            f"num_key_value_heads is {sizes['num_kv_heads']}: expected num_attention_heads="
            f"{sizes['num_heads']}, latent attention does not group queries"
        )
    if fields.size("moe_layer_freq", default=1) != 1:
        found = fields.value("moe_layer_freq")
        raise ValueError(f"moe_layer_freq is {found}: expected 1 (experts in every later layer)")
    num_experts = fields.size("n_routed_experts", "num_local_experts")
    methods = {"noaux_tc": "bias", "greedy": "", "group_limited_greedy": ""}
    routing = fields.choice("topk_method", choices=methods, default="noaux_tc")
    moe = MoEShape(
        num_experts=num_experts,
        experts_per_token=fields.size("num_experts_per_tok", maximum=num_experts),
        expert_ff_dim=fields.size("moe_intermediate_size"),
        num_shared_experts=fields.size("n_shared_experts", default=1, minimum=0),
        num_dense_layers=fields.size(
            "first_k_dense_replace", default=3, minimum=0, maximum=sizes["num_layers"]
        ),
        router_bias=routing == "bias",
    )
    mla = LatentAttention(
        # Absent is the class's default; null is none at all (DeepSeek-V2-Lite's queries).
        q_rank=fields.size("q_lora_rank", default=None if "q_lora_rank" in fields else 1536),
        kv_rank=fields.size("kv_lora_rank"),
        nope_head_dim=fields.size("qk_nope_head_dim"),
        rope_head_dim=fields.size("qk_rope_head_dim"),
        value_head_dim=fields.size("v_head_dim"),
    )
    if fields.size("qk_head_dim", default=mla.head_dim) != mla.head_dim:
        raise ValueError(
            f"qk_head_dim is {fields.value('qk_head_dim')}: expected qk_nope_head_dim + "
            f"qk_rope_head_dim = {mla.head_dim}"
        )
    return {**sizes, "moe": moe, "mla": mla}


def _gpt2(fields: Fields) -> dict[str, Any]:
    _refuse(fields, "add_cross_attention")
    dim = fields.size("n_embd", "hidden_size")
    num_heads = fields.size("n_head", "num_attention_heads")
    _divides("n_embd", dim, "n_head", num_heads)
    rates = [fields.probability(f"{part}_pdrop", 0.1) for part in ("attn", "embd", "resid")]
    return {
        "vocab_size": fields.size("vocab_size"),
        "dim": dim,
        "num_layers": fields.size("n_layer", "num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "ff_dim": fields.size("n_inner", default=4 * dim),
        "max_seq_len": fields.size("n_positions", "max_position_embeddings", default=1024),
        "mlp": fields.choice("activation_function", choices=_GPT2_MLP, default="gelu_new"),
        "tied": fields.flag("tie_word_embeddings", default=True),
        "norm": "layernorm",
        "position": "learned",
        "bias": True,
        "dropout": any(rates),
    }


def _divides(name: str, value: int, by: str, divisor: int) -> None:
    if value % divisor:
        raise ValueError(f"{name} is {value}: expected a multiple of {by}={divisor}")


def _refuse(fields: Fields, flag: str) -> None:
    if fields.flag(flag, False):
        raise ValueError(f"{flag} is true: expected false, a ModelShape has no room for it")


_READERS: dict[str, Callable[[Fields], dict[str, Any]]] = {
    "deepseek_v3": _deepseek_v3,
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}

MODEL_TYPES: tuple[str, ...] = tuple(_READERS)
"""The values of `model_type` that are understood."""
