"""Reads Hugging Face's config.json field by field; what this engine does not implement is refused by name.

Needs no torch: a router reads checkpoints too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Self

from engine.errors import CheckpointError, UnsupportedFieldError
from engine.models.text_halves import MULTIMODAL, PREFIXES, text_half
from engine.quantization.config import is_mxfp4, read_quantization
from engine.quantization.spec import QuantizationSpec

MAX_INTEGER = 2**31
MAX_LAYERS = 10_000  # a small file must not ask for much
# What transformers assumes where the config of an architecture says nothing, and is not the default of the code that
# reads it. A field that is null is said: it is not there.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "CohereForCausalLM": {"eos_token_id": 255001},
    "Cohere2ForCausalLM": {"eos_token_id": 255001, "sliding_window": 4096},
    "DeepseekV2ForCausalLM": {"q_lora_rank": 1536},
    "DeepseekV3ForCausalLM": {"q_lora_rank": 1536},
    "GPT2LMHeadModel": {
        "n_embd": 768,
        "n_layer": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
        "eos_token_id": 50256,
    },
    "Gemma2ForCausalLM": {
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "Gemma3ForCausalLM": {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "Glm4ForCausalLM": {"num_key_value_heads": 2},
    "Glm4MoeForCausalLM": {"num_key_value_heads": 8},
    "Glm4MoeLiteForCausalLM": {
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    },
    "GptOssForCausalLM": {"num_key_value_heads": 8},
    "GraniteMoeSharedForCausalLM": {"shared_intermediate_size": 0},
    "Lfm2ForCausalLM": {"num_key_value_heads": 8},
    "Lfm2MoeForCausalLM": {"num_key_value_heads": 8},
    "Llama4ForCausalLM": {"num_key_value_heads": 8},
    "MiniMaxM2ForCausalLM": {"num_key_value_heads": 8},
    "MinistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "Ministral3ForCausalLM": {"num_key_value_heads": 8},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "MixtralForCausalLM": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    "NemotronHForCausalLM": {"num_key_value_heads": 8},
    "Phi3ForCausalLM": {"rms_norm_eps": 1e-5},
    "Qwen2MoeForCausalLM": {"num_local_experts": 60, "num_experts_per_tok": 4},
    "Qwen3MoeForCausalLM": {"num_key_value_heads": 4, "num_local_experts": 128},
    "Qwen3NextForCausalLM": {"num_key_value_heads": 2, "num_local_experts": 512, "num_experts_per_tok": 10},
    "Qwen3_5ForCausalLM": {"num_key_value_heads": 4},
    "Qwen3_5MoeForCausalLM": {"num_key_value_heads": 2, "num_local_experts": 256},
    "StableLmForCausalLM": {"num_key_value_heads": 32, "eos_token_id": 0},
}
# What older families call fields that all have.
OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "max_position_embeddings": ("n_positions",),
}
# What a few call them where they have none by those names; elsewhere it may mean something else.
RARE_NAMES = {
    "hidden_size": ("emb_dim",),
    "num_hidden_layers": ("n_layers", "decoder_layers"),
    "max_position_embeddings": ("max_seq_len", "max_target_positions", "model_max_length"),
}


@dataclass(frozen=True, slots=True)
class HFConfig:
    """One config.json with typed access; every complaint is a `CheckpointError` that names the field.

    What the family does not implement is an `UnsupportedFieldError`.

    values: without those that are null. nulls: the names of these.
    """

    values: Mapping[str, Any]
    nulls: frozenset[str] = frozenset()

    @property
    def architecture(self) -> str:
        """The first of `architectures`."""
        names = self.values.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise CheckpointError("config.json: architectures must name the model's class, such as LlamaForCausalLM")
        return names[0]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the field as it is, `default` where it is absent."""
        return self.values.get(name, default)

    def spelling(self, name: str) -> str:
        """Return what this file calls a field that older families call otherwise; refuses two that differ."""
        others = [other for other in OTHER_NAMES[name] if other in self.values]
        for other in others:
            if self.values.get(name, self.values[other]) != self.values[other]:
                raise CheckpointError(
                    f"config.json: {name} is {self.values[name]!r} and {other} is {self.values[other]!r}; "
                    "they mean the same: leave one out"
                )
        if name in self.values:
            return name
        rare = [other for other in RARE_NAMES[name] if other in self.values]
        return next(iter(others + rare), name)

    def integer(self, name: str, default: int | None = None, low: int = 1, high: int = MAX_INTEGER) -> int:
        """Return a whole number of at least `low` and at most `high`."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            most = f" and at most {high}" if isinstance(value, int) and value > high else ""
            raise CheckpointError(f"config.json: {name} must be an integer of at least {low}{most}, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number above zero."""
        return positive(self.values, name, default, "config.json")

    def flag(self, name: str, default: bool = False, *, or_number: bool = False) -> bool:
        """Return a true/false field; null is false. or_number: whether it may be a number, of which 0 is false."""
        value = self.get(name, default and name not in self.nulls)
        if or_number and isinstance(value, int):
            return bool(value)
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {name} must be true or false, not {value!r}")
        return value

    def choice(self, name: str, known: Collection[str], default: str) -> str:
        """Return one of the words `known`."""
        value = self.get(name, default)
        if value not in known:
            raise UnsupportedFieldError(
                f"config.json: {name} = {value!r} is not supported; known: {', '.join(known)}"
            )
        return str(value)

    def layer_types(self, known: Collection[str], num_layers: int) -> tuple[str, ...] | None:
        """Return what each layer is, one of the words `known`; None where the file does not say."""
        types = self.get("layer_types")
        if types is None:
            return None
        if not isinstance(types, Sequence) or len(types) != num_layers:
            raise CheckpointError(f"config.json: layer_types must list {num_layers} layers")
        for kind in types:
            if kind not in known:
                raise UnsupportedFieldError(
                    f"config.json: layer_types has {kind!r}, which is not supported; known: {', '.join(known)}"
                )
        return tuple(types)

    def refuse(self, name: str, allowed: Any, *, ignored: bool = False) -> None:
        """Refuse the field when it is set to anything but `allowed`. ignored: whether transformers ignores it."""
        if self.get(name, allowed) != allowed:
            kind = CheckpointError if ignored else UnsupportedFieldError
            raise kind(f"config.json: {name} = {self.get(name)!r} is not supported, only {allowed!r}")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What every model's config.json says; what only some do a family reads from `hf`.

    dtype: what the weights were saved in, by torch's name such as "bfloat16". eos_token_ids: tokens that end a text,
    as the model's own files say; may be empty.
    quantization: of the checkpoint, None = plain weights. raw: config.json as
    it is, of a text half what it says of that. implementation: who builds the model, "native" or "transformers".
    falls_back: whether transformers' layers serve it where the native family does not implement a field.
    text_half_of: the architecture of a model that sees images, too, of which this is the text half; "" = none.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_positions: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    quantization: QuantizationSpec | None
    hf: HFConfig
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    implementation: str = "native"
    falls_back: bool = False
    text_half_of: str = ""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Read a parsed config.json. Raises `CheckpointError` naming the field that is wrong."""
        values, text_half_of = _text_half(values)
        assumed = {**DEFAULTS.get(HFConfig(values).architecture, {}), **values}
        nulls = frozenset(name for name, value in values.items() if value is None)
        hf = HFConfig({name: value for name, value in assumed.items() if value is not None}, nulls)
        if "vocab_size" not in hf.values and isinstance(hf.get("text_config"), Mapping):
            near = ", ".join(get_close_matches(hf.architecture, sorted(MULTIMODAL), cutoff=0.0))
            raise CheckpointError(
                f"config.json: architecture {hf.architecture!r} is not supported: it has a text_config, and the text "
                f"half of such models is served for known architectures alone; the nearest: {near}"
            )
        vocab = hf.integer("vocab_size")
        # A checkpoint of 4 bits, gpt-oss say, need not name what it was trained in.
        dtype = "bfloat16" if is_mxfp4(values) else "float32"
        quantization = read_quantization(values)
        if quantization is not None and text_half_of:
            quantization = replace(quantization, prefixes=PREFIXES)
        return cls(
            architecture=hf.architecture,
            hidden_size=hf.integer(hf.spelling("hidden_size")),
            num_layers=_count_layers(hf),
            vocab_size=vocab,
            max_positions=_max_positions(hf),
            dtype=str(hf.get("dtype", hf.get("torch_dtype", dtype))).removeprefix("torch."),
            eos_token_ids=known_token_ids(hf.get("eos_token_id"), vocab),
            quantization=quantization,
            hf=hf,
            raw=values,
            text_half_of=text_half_of,
        )


def _count_layers(hf: HFConfig) -> int:
    """Return `num_hidden_layers`, or of a file that only lists the layers how many there are (Nemotron-H)."""
    listed = hf.get("layers_block_type", hf.get("hybrid_override_pattern"))
    counted = len(listed) if isinstance(listed, list | str) and listed else None
    return hf.integer(hf.spelling("num_hidden_layers"), counted, high=MAX_LAYERS)


def _max_positions(hf: HFConfig) -> int:
    """Return the most tokens of a sequence: of YaRN factor x the length before it, as in vLLM and transformers."""
    trained = hf.integer(hf.spelling("max_position_embeddings"))
    name = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    given = hf.get(name)
    ropes = [given, *given.values()] if isinstance(given, Mapping) else []
    for rope in ropes:
        if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) != "yarn":
            continue
        where, field = f"config.json: {name}", "original_max_position_embeddings"
        original = positive({field: hf.get(field, rope.get(field))}, field, trained, where)
        stretched = positive(rope, "factor", trained / original, where) * original
        if not 1 <= stretched <= MAX_INTEGER:
            raise CheckpointError(
                f"{where}: factor x {field} must be 1 to {MAX_INTEGER} tokens, not {stretched:g}; factor 4.0 is usual"
            )
        return round(stretched)
    return trained


def _text_half(values: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return the config of the text half of a model that sees images, too, and the model's name; else `values`."""
    name = HFConfig(values).architecture
    return (text_half(values, name), name) if name in MULTIMODAL else (values, "")


def known_token_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    """Return `value` (an id, a list of them or None) as a tuple without ids that the vocabulary lacks."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise CheckpointError(f"config.json: token ids must be integers, not {value!r}")
    return tuple(i for i in ids if 0 <= i < vocab_size)


def positive(values: Mapping[str, Any], name: str, default: float | None, where: str) -> float:
    """Return a number above zero of `values`. where: what a complaint says of them."""
    value = values.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(f"{where}: {name} must be a number above 0, not {value!r}")
    return float(value)
