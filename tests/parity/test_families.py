"""Every native family, served: transformers' tokens with chunks, preemption, a prefix hit and n = 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.models.registry import FAMILIES
from tests.parity.census import check, save_oracle

TYPES = [name for name, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if architecture in FAMILIES]
# One of each kind of layer that is split over ranks in a way of its own.
SPLIT = ("gpt_oss", "minimax_m2")
RECURRENT = ("lfm2", "qwen3_next")


# Fields of configs whose default layers are all of one kind.
FIELDS = {"lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32}}


def settings(model_type: str) -> dict[str, int]:
    """Have models with a recurrent state find prefixes that are as short as these."""
    return {"state_snapshot_blocks": 1, "num_state_snapshots": 40} if model_type in RECURRENT else {}


@pytest.mark.parametrize("model_type", TYPES)
def test_a_family_gives_the_tokens_of_transformers(model_type: str, tmp_path: Path) -> None:
    check(
        save_oracle(model_type, tmp_path, **FIELDS.get(model_type, {})), model_impl="native", **settings(model_type)
    )


@pytest.mark.parametrize("model_type", SPLIT)
def test_two_ranks_give_the_same_tokens(model_type: str, tmp_path: Path) -> None:
    check(save_oracle(model_type, tmp_path, **FIELDS.get(model_type, {})), 2, "native", **settings(model_type))


@pytest.mark.long
@pytest.mark.parametrize("model_type", [name for name in TYPES if name not in SPLIT])
def test_two_ranks_of_any_family_give_the_same_tokens(model_type: str, tmp_path: Path) -> None:
    check(save_oracle(model_type, tmp_path, **FIELDS.get(model_type, {})), 2, "native", **settings(model_type))
