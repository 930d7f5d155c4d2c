"""What null means in config.json: what transformers makes of it, where it makes a model of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from engine.config import EngineConfig
from engine.worker.runner import ModelRunner
from parallel.group import SoloGroup
from tests.parity.stepping import Stepper
from tests.parity.tiny_models import CONFIGS, check_against, prompts

pytestmark = pytest.mark.usefixtures("one_thread")
OTHERS = {"pad_token_id", "bos_token_id", "eos_token_id", "attention_dropout"}  # that no layer reads


def nullable(config: transformers.PreTrainedConfig) -> list[str]:
    """Return the fields of a config that may be null, and are something else where nothing is said."""
    annotated: dict[str, str] = {}
    for base in type(config).__mro__[: type(config).__mro__.index(transformers.PreTrainedConfig)]:
        annotated |= {name: str(kind) for name, kind in vars(base).get("__annotations__", {}).items()} | annotated
    said = config.to_dict()
    return [
        name
        for name, kind in annotated.items()
        if "None" in kind and name in said and name not in OTHERS and getattr(type(config), name, None) is not None
    ]


def with_null(config: transformers.PreTrainedConfig, name: str) -> transformers.PreTrainedModel | None:
    """Return a random model of a config with null in one field, None where transformers makes none of it."""
    torch.manual_seed(0)
    try:
        made = type(config)(**{**config.to_dict(), name: None})
        model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32)
        with torch.no_grad():
            model.eval()(input_ids=torch.ones(1, 20, dtype=torch.int64), use_cache=False)
    except Exception:  # each class fails in its own way
        return None
    return model


@pytest.mark.parametrize("kind", [kind for kind, make in CONFIGS.items() if nullable(make())])
def test_null_is_what_transformers_makes_of_it(kind: str, tmp_path: Path) -> None:
    config = CONFIGS[kind]()
    for name in nullable(config):
        if (model := with_null(config, name)) is None:
            continue
        model.save_pretrained(tmp_path / name)
        file = tmp_path / name / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {name: None}))
        engine = EngineConfig(str(tmp_path / name), num_kv_blocks=200, block_size=4, device="cpu", dtype="float32")
        ragged = prompts(3)
        found = Stepper(ModelRunner(engine, SoloGroup())).generate(ragged, 5)
        check_against(model, found, ragged)


def test_models_are_made_of_nulls() -> None:
    """Or nothing above would be compared."""
    made = [
        (kind, name)
        for kind in ("gemma2", "mistral")
        for name in nullable(CONFIGS[kind]())
        if with_null(CONFIGS[kind](), name)
    ]
    assert {("gemma2", "attn_logit_softcapping"), ("mistral", "sliding_window")} <= {*made}
