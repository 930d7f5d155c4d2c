"""What the families can do, found by building each over transformers' default config of it, without weights.

A family that lands in the registry is described by what it is made of; nothing of that is written down by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from engine.config import config_fields
from engine.errors import CheckpointError
from engine.kv.cache_specs import CacheSpec, FullAttentionSpec, LatentSpec, RecurrentSpec, SlidingWindowSpec
from engine.layers.moe import Experts
from engine.models.blueprint import blueprint
from engine.models.causal_lm import CausalLM
from engine.models.config import ModelConfig
from engine.models.registry import FAMILIES
from engine.quantization.select import MADE_AT_LOAD
from parallel.errors import ShardingError
from parallel.linear import ParallelLinear

# Small enough to be built in no time, with a layer of each kind: patterns of layers repeat within eight.
NUM_LAYERS = 8
NUM_EXPERTS = 16  # at most: enough for all groups of experts, and for those that a token is sent to
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # as configs call them
# Of families whose defaults in transformers are no model that could be run, or show not all kinds of their layers.
EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "DeepseekV2ForCausalLM": {"moe_intermediate_size": 1408},
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"] * 4},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2},
}
KINDS: Mapping[type[CacheSpec], str] = {
    FullAttentionSpec: "full",
    SlidingWindowSpec: "window",
    LatentSpec: "latent",
    RecurrentSpec: "state",
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What one architecture can do here.

    model_types: what config.json calls it. implementation: "native" or "transformers". attention: what its layers
    keep of tokens: "full", "window" (of the last ones), "latent" (MLA), "state" (recurrent); () = only a config of
    its own says it. tensor_parallel / expert_parallel: whether it can be split over ranks so. quantization: the
    methods of its weights.
    """

    architecture: str
    model_types: tuple[str, ...]
    implementation: str
    attention: tuple[str, ...]
    experts: bool
    tensor_parallel: bool
    expert_parallel: bool
    quantization: tuple[str, ...]

    @property
    def state(self) -> bool:
        """Whether it keeps a recurrent state, of one size however many tokens there are."""
        return "state" in self.attention


def model_types() -> dict[str, list[str]]:
    """Return the types by which transformers knows each architecture, the one that is named like it first."""
    found: dict[str, list[str]] = {}
    for names in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        for model_type, architecture in names.items():
            found.setdefault(architecture, []).append(model_type)
    for architecture, types in found.items():
        types.sort(key=lambda name: (not architecture.lower().startswith(name.replace("_", "")), name))
    return found


def native_facts() -> Iterator[Facts]:
    """Yield what each native family can do, in the order of the registry."""
    types = model_types()
    for architecture in FAMILIES:
        yield _of_family(architecture, tuple(types.get(architecture, ())))


def transformers_facts() -> Iterator[Facts]:
    """Yield the decoders of the installed transformers that have no native family, by name.

    Whether one can be served is found out when its own config is read: see docs/guides/models.md.
    """
    for architecture, types in sorted(model_types().items()):
        causal = [name for name in types if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
        if architecture in FAMILIES or not causal:
            continue
        config = CONFIG_MAPPING[causal[0]]
        split = bool(getattr(config, "base_model_tp_plan", None))
        yield Facts(architecture, tuple(causal), "transformers", (), False, split, False, ())


@cache
def _of_family(architecture: str, types: tuple[str, ...]) -> Facts:
    try:
        model = _built(architecture, types, 1)
    except CheckpointError:  # what transformers assumes where a config says nothing need not be a model
        return Facts(architecture, types, "native", (), False, False, False, ())
    kinds = {KINDS.get(type(spec), type(spec).__name__) for spec in model.cache_specs(torch.float32)}
    experts = any(isinstance(part, Experts) for part in model.modules())
    quantised = any(isinstance(part, ParallelLinear) for part in model.layers.modules())
    return Facts(
        architecture,
        types,
        "native",
        tuple(sorted(kinds)),
        experts,
        tensor_parallel=_splits(architecture, types),
        expert_parallel=experts and "enable_expert_parallel" in config_fields(),
        quantization=MADE_AT_LOAD if quantised else (),
    )


def _splits(architecture: str, types: tuple[str, ...]) -> bool:
    try:
        _built(architecture, types, 2)
    except (CheckpointError, ShardingError):
        return False
    return True


def _built(architecture: str, types: tuple[str, ...], size: int) -> CausalLM:
    return blueprint(default_config(architecture, types, NUM_EXPERTS), size)


def default_config(architecture: str, types: tuple[str, ...], most_experts: int = sys.maxsize) -> ModelConfig:
    """Return the config that transformers gives a family where nothing is said, with few layers.

    Raises `CheckpointError` for an architecture that transformers does not know.
    """
    if not types:
        raise CheckpointError(f"architecture {architecture!r}: the installed transformers has no config of it")
    name = next((name for name in types if name.endswith("_text")), types[0])
    values: dict[str, Any] = AutoConfig.for_model(name, num_hidden_layers=NUM_LAYERS).to_dict()
    values |= {key: min(values[key], most_experts) for key in EXPERT_COUNTS if isinstance(values.get(key), int)}
    values |= {**EXAMPLES.get(architecture, {}), "architectures": [architecture]}
    return replace(ModelConfig.of(values), implementation="native")
