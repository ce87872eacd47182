"""Take typed values out of a configuration, and know at the end which were never asked for.

A field may go by several names (GPT-2's `n_embd` is `hidden_size` elsewhere). A wrong type, a size
out of range or two names that disagree raise ValueError with the field, what was found and what
was expected. Left out: fields within fields.

    fields = Fields({"hidden_size": 64, "colour": "blue"})
    fields.size("hidden_size")      # 64
    fields.unused                   # ("colour",)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from playbook_utils.predict._checks import is_whole

__all__ = ["IRRELEVANT", "LARGEST_SIZE", "Fields", "printable", "short"]

LARGEST_SIZE = 10**9
"""No size of a real model comes near it."""

IRRELEVANT = frozenset({
    "architectures", "auto_map", "aux_loss_alpha", "bad_words_ids", "begin_suppress_tokens",
    "bos_token_id", "chunk_size_feed_forward", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id",
    "ep_size", "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
    "forced_eos_token_id", "id2label", "initializer_range", "is_decoder", "is_encoder_decoder",
    "label2id", "layer_norm_epsilon", "length_penalty", "max_length", "max_window_layers",
    "min_length", "model_type", "n_ctx", "n_group", "no_repeat_ngram_size", "norm_topk_prob",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_router_logits", "output_scores", "pad_token_id", "prefix",
    "pretraining_tp", "problem_type", "pruned_heads", "quantization_config",
    "remove_invalid_values", "reorder_and_upcast_attn", "repetition_penalty", "return_dict",
    "return_dict_in_generate", "rms_norm_eps", "rope_interleave", "rope_parameters", "rope_scaling",
    "rope_theta", "routed_scaling_factor", "router_aux_loss_coef", "router_jitter_noise",
    "scale_attn_by_inverse_layer_idx", "scale_attn_weights", "scoring_func", "sep_token_id",
    "seq_aux", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
    "summary_type", "summary_use_proj", "suppress_tokens", "task_specific_params", "temperature",
    "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "topk_group",
    "torch_dtype", "torchscript", "transformers_version", "typical_p", "unsloth_fixed",
    "unsloth_version", "use_bfloat16", "use_cache", "use_mrope",
})  # fmt: skip
"""Fields of the supported models that change neither a shape nor what a training step costs."""

_REQUIRED: Any = object()


class Fields:
    """One configuration, read field by field; null counts as absent, as it does in Hugging Face."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._asked: set[str] = set()

    @property
    def unused(self) -> tuple[str, ...]:
        """Names that hold something and that nobody asked for, in the configuration's order."""
        return tuple(
            name
            for name, value in self._values.items()
            if value is not None and name not in self._asked
        )

    def value(self, *names: str) -> Any:
        """The value under one of `names`; None where all are absent or null."""
        self._asked.update(names)
        found = {name: self._values[name] for name in names if self._values.get(name) is not None}
        first, *others = found.items() or [("", None)]
        for name, value in others:
            if value != first[1]:
                raise ValueError(
                    f"{first[0]} is {short(first[1])} but {name} is {short(value)}: "
                    "they are the same field, expected the same value"
                )
        return first[1]

    def __contains__(self, name: str) -> bool:
        """Whether the field is there, be it null."""
        return name in self._values

    def size(
        self,
        *names: str,
        default: int | None = _REQUIRED,
        minimum: int = 1,
        maximum: int = LARGEST_SIZE,
    ) -> Any:
        """A whole number from `minimum` to `maximum`."""
        value = self.value(*names)
        expected = f"a whole number from {minimum:,} to {maximum:,}"
        if value is None:
            if default is _REQUIRED:
                raise ValueError(f"{names[0]} is missing: expected {expected}")
            return default
        if not is_whole(value, minimum) or value > maximum:
            raise ValueError(f"{self._name(names)} is {short(value)}: expected {expected}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.value(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise ValueError(f"{name} is {short(value)}: expected true or false")
        return value

    def probability(self, name: str, default: float) -> float:
        """A number in [0, 1)."""
        value = self.value(name)
        if value is None:
            return default
        if type(value) not in (int, float) or not 0 <= value < 1:
            raise ValueError(f"{name} is {short(value)}: expected a number from 0 to below 1")
        return float(value)

    def choice(self, *names: str, choices: Mapping[str, str], default: str) -> str:
        """What `choices` makes of the field, or of `default` where it is absent."""
        value = self.value(*names)
        value = default if value is None else value
        if not isinstance(value, str) or value not in choices:
            expected = ", ".join(choices)
            raise ValueError(f"{self._name(names)} is {short(value)}: expected one of {expected}")
        return choices[value]

    def _name(self, names: tuple[str, ...]) -> str:
        return next((name for name in names if self._values.get(name) is not None), names[0])


def printable(text: str) -> str:
    """`text` without what moves the cursor or colours a terminal: a file may hold any name."""
    return "".join(character for character in text if character.isprintable())


def short(value: object) -> str:
    """`value` as Python writes it, cut off where a message would drown in it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
