"""Quantised checkpoints against transformers in fp32 with the weights that they stand for, on one rank and on two."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import transformers

from engine.config import EngineConfig
from engine.worker.runner import ModelRunner
from parallel.group import SoloGroup
from tests.parity.stepping import Stepper
from tests.parity.stored_formats import FORMATS, REORDERED, store
from tests.parity.tiny_models import check_against, prompts

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS = ("llama", "qwen3_moe")


def config(folder, **values):
    return EngineConfig(str(folder), **{"num_kv_blocks": 200, "block_size": 4, "device": "cpu", **values})


def oracle(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "plain", attn_implementation="eager").eval()


def made(models, tmp_path, name, kind, skip=()):
    store(models(name)[1], tmp_path, *(FORMATS | REORDERED)[kind], skip)
    return oracle(tmp_path), config(tmp_path / "stored", dtype="float32")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", [*FORMATS, *REORDERED])
def test_one_rank_says_what_the_weights_stand_for(models, tmp_path, name, kind):
    model, asked = made(models, tmp_path, name, kind)
    ragged = prompts(3, seed=4)
    check_against(model, Stepper(ModelRunner(asked, SoloGroup())).generate(ragged, 5), ragged)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", FORMATS)
def test_two_ranks_say_the_same(two_ranks, models, tmp_path, name, kind):
    model, asked = made(models, tmp_path, name, kind)
    ranks = two_ranks(lambda group: ModelRunner(asked, group))

    def execute(inputs, draws):
        return two_ranks(lambda group: ranks[group.rank].execute(inputs, None if group.rank else draws))[0]

    gang = Stepper(SimpleNamespace(model=ranks[0].model, config=ranks[0].config, execute=execute))
    ragged = prompts(3, seed=4)
    check_against(model, gang.generate(ragged, 5), ragged)
