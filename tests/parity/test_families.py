"""Every native family, served: transformers' tokens with chunks, preemption, a prefix hit and n = 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

from engine.models.registry import FAMILIES
from tests.parity.census import check, save_oracle
from tests.parity.tiny_models import RECURRENT as RECURRENT_CONFIGS

TYPES = [name for name, architecture in NAMES.items() if architecture in FAMILIES]
# One of each kind of layer that is split over ranks in a way of its own.
SPLIT = ("gpt_oss", "minimax_m2", "granitemoehybrid")
RECURRENT = {NAMES[make_config().model_type] for make_config in RECURRENT_CONFIGS.values()}


SMALL_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
# Fields of configs whose default layers are all of one kind.
FIELDS = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]} | SMALL_MAMBA,
    "nemotron_h": {"ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2},
}


def settings(model_type: str) -> dict[str, int]:
    """Have models with a recurrent state find prefixes that are as short as these."""
    return {"state_snapshot_blocks": 1, "num_state_snapshots": 40} if NAMES[model_type] in RECURRENT else {}


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
