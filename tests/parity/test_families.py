"""Every native family, served: transformers' tokens with chunks, preemption, a prefix hit and n = 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

from engine.models.registry import FAMILIES
from tests.parity.census import check, save_oracle

pytestmark = pytest.mark.usefixtures("one_thread")
TYPES = [name for name, architecture in NAMES.items() if architecture in FAMILIES]
# One of each kind of layer that is split over ranks in a way of its own.
SPLIT = ("gpt_oss", "minimax_m2", "granitemoehybrid")


@pytest.mark.parametrize("model_type", TYPES)
def test_a_family_gives_the_tokens_of_transformers(model_type: str, tmp_path: Path) -> None:
    check(save_oracle(model_type, tmp_path), model_impl="native")


@pytest.mark.parametrize("model_type", SPLIT)
def test_two_ranks_give_the_same_tokens(model_type: str, tmp_path: Path) -> None:
    check(save_oracle(model_type, tmp_path), 2, "native")


@pytest.mark.long
@pytest.mark.parametrize("model_type", [name for name in TYPES if name not in SPLIT])
def test_two_ranks_of_any_family_give_the_same_tokens(model_type: str, tmp_path: Path) -> None:
    check(save_oracle(model_type, tmp_path), 2, "native")
