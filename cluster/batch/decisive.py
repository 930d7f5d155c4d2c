"""What decides the answers of a model beside its weights: a batch that goes on goes on with the same."""

from __future__ import annotations

from typing import Any

from cluster.config import ModelConfig
from engine.loader.fingerprint import prompt_fingerprint

SETTINGS = (
    "seed",
    "tokenizer",
    "max_model_len",
    "served_model_name",
    "tool_call_parser",
    "reasoning_parser",
    "embedding_pooling",
)


def decisive(config: ModelConfig) -> dict[str, Any]:
    """Return it as JSON has it, by name: settings, and what makes prompts of requests. Raises `CheckpointError`."""
    settings = {name: getattr(config, name) for name in SETTINGS}
    return {**settings, "prompts": prompt_fingerprint(config.model, config.tokenizer)}
