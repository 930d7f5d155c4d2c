"""Which architectures this engine serves: name in config.json -> the family that builds it.

Needs no torch: a family is imported when a model is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from engine.errors import CheckpointError

FAMILIES: Mapping[str, str] = {
    "LlamaForCausalLM": "engine.models.llama.Llama",
    "Qwen2ForCausalLM": "engine.models.qwen.Qwen2",
    "Qwen3ForCausalLM": "engine.models.qwen.Qwen3",
    "MistralForCausalLM": "engine.models.mistral.Mistral",
    "GPT2LMHeadModel": "engine.models.gpt2.GPT2",
}


def check_architecture(architecture: str) -> None:
    """Raise `CheckpointError` for an architecture that is not served."""
    if architecture not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise CheckpointError(f"config.json: architecture {architecture!r} is not supported; known: {known}")


def family_of(architecture: str) -> Any:
    """Return the class of an architecture, a `CausalLM`. Raises `CheckpointError` for one that is not served."""
    check_architecture(architecture)
    module, _, name = FAMILIES[architecture].rpartition(".")
    return getattr(import_module(module), name)
