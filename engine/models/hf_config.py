"""Reads Hugging Face's config.json field by field; what this engine does not implement is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import CheckpointError
from engine.models.spec import RopeSpec

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
MAX_INTEGER = 2**31
MAX_LAYERS = 10_000
LAYER_TYPES = ("full_attention", "sliding_attention")


class HFConfig:
    """One config.json with typed access; every complaint is a `CheckpointError` that names the field."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    @property
    def architecture(self) -> str:
        """The first of `architectures`."""
        names = self._values.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise CheckpointError("config.json: architectures must name the model's class, such as LlamaForCausalLM")
        return names[0]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the field as it is, `default` where it is absent or null."""
        value = self._values.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None, low: int = 1, high: int = MAX_INTEGER) -> int:
        """Return a whole number of at least `low` and at most `high`."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            most = f" and at most {high}" if isinstance(value, int) and value > high else ""
            raise CheckpointError(f"config.json: {name} must be an integer of at least {low}{most}, not {value!r}")
        return value

    @property
    def num_layers(self) -> int:
        """The number of layers. A small file must not ask for much: some of what it says is kept for each layer."""
        return self.integer("num_hidden_layers", high=MAX_LAYERS)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number above zero."""
        return _positive(self._values, name, default, "config.json")

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a true/false field."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {name} must be true or false, not {value!r}")
        return value

    def refuse(self, name: str, allowed: Any) -> None:
        """Refuse the field when it is set to anything but `allowed`."""
        if self.get(name, allowed) != allowed:
            raise CheckpointError(f"config.json: {name} = {self.get(name)!r} is not supported, only {allowed!r}")

    def activation(self, name: str, default: str) -> str:
        """Return the name of an activation function that the decoder has."""
        value = self.get(name, default)
        if value not in ACTIVATIONS:
            raise CheckpointError(
                f"config.json: {name} = {value!r} is not supported; known: {', '.join(ACTIVATIONS)}"
            )
        return str(value)

    def token_ids(self, name: str, default: int | None = None) -> tuple[int, ...]:
        """Return one id or a list of ids as a tuple; ids outside the vocabulary are dropped."""
        return known_token_ids(self.get(name, default), self.integer("vocab_size", 2**31))

    @property
    def dtype(self) -> str:
        """What the weights were saved in; "float32" where the file does not say."""
        return str(self.get("dtype", self.get("torch_dtype", "float32"))).removeprefix("torch.")

    def rope(self, head_dim: int) -> RopeSpec:
        """Return the rotary settings, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
        self.refuse("partial_rotary_factor", 1.0)
        name = "rope_parameters" if self.get("rope_parameters") else "rope_scaling"
        given = self.get(name) or {}
        if not isinstance(given, Mapping):
            raise CheckpointError(f"config.json: {name} must be an object, not {given!r}")
        scaling = dict(given)
        if any(isinstance(value, Mapping) for value in scaling.values()):
            raise CheckpointError("config.json: rope_parameters differing per layer type are not supported")
        scaling.setdefault("rope_theta", self.get("rope_theta", 10000.0))
        if scaling.get("partial_rotary_factor", 1.0) != 1.0 or head_dim % 2:
            raise CheckpointError("config.json: rotary embeddings must cover a whole, even head_dim")
        return _rope_spec(scaling, self.integer("max_position_embeddings", 2048))

    def layer_windows(self, num_layers: int) -> tuple[int, ...]:
        """Return each layer's window as Qwen writes it: `use_sliding_window`, `layer_types`, `max_window_layers`."""
        window = self.integer("sliding_window", 4096) if self.flag("use_sliding_window") else 0
        types = self.get("layer_types")
        if types is None:
            first = self.integer("max_window_layers", 28, low=0)
            return tuple(window if layer >= first else 0 for layer in range(num_layers))
        _check_layer_types(types, num_layers)
        return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def known_token_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    """Return `value` (an id, a list of them or None) as a tuple without ids that the vocabulary lacks."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise CheckpointError(f"config.json: token ids must be integers, not {value!r}")
    return tuple(i for i in ids if 0 <= i < vocab_size)


def _check_layer_types(types: Any, num_layers: int) -> None:
    if not isinstance(types, Sequence) or len(types) != num_layers:
        raise CheckpointError(f"config.json: layer_types must list {num_layers} layers")
    for kind in types:
        if kind not in LAYER_TYPES:
            raise CheckpointError(
                f"config.json: layer_types has {kind!r}, which is not supported; known: {', '.join(LAYER_TYPES)}"
            )


def _rope_spec(scaling: Mapping[str, Any], max_positions: int) -> RopeSpec:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    where = "config.json: rope_parameters"
    theta = _positive(scaling, "rope_theta", 10000.0, where)
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, "linear", _positive(scaling, "factor", None, where))
    if kind == "llama3":
        return RopeSpec(
            theta,
            "llama3",
            _positive(scaling, "factor", None, where),
            _positive(scaling, "low_freq_factor", None, where),
            _positive(scaling, "high_freq_factor", None, where),
            int(_positive(scaling, "original_max_position_embeddings", float(max_positions), where)),
        )
    raise CheckpointError(f"{where}: rope_type {kind!r} is not supported; known: default, linear, llama3")


def _positive(values: Mapping[str, Any], name: str, default: float | None, where: str) -> float:
    value = values.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(f"{where}: {name} must be a number above 0, not {value!r}")
    return float(value)
