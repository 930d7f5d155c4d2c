"""Which class of transformers reads a folder's tokenizer, and that a router needs no torch for it."""

import json
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from engine.errors import CheckpointError
from engine.text.tokenizer_file import GENERIC_CLASSES, TAKEN_AS_DECLARED, load_tokenizer
from tests import tiny_tokenizer

MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "<|eos|> 🙂 naïve\n\n"}]

ROUTER = """
import sys
import cluster.deployments.router
from cluster.config import resolve_config
from cluster.router.models.served import served_model

served = served_model(resolve_config({"model": "demo", "tensor_parallel_size": 2}))
assert served.tokenizer.encode("def main") and served.tokenizer.render_chat([{"role": "user", "content": "hi"}])
print("torch" in sys.modules)
"""


def declared(folder, model_type, tokenizer_class):
    tiny_tokenizer.save(tiny_tokenizer.byte_level(), folder)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": tokenizer_class}))
    return folder


@pytest.mark.parametrize("tokenizer_class", GENERIC_CLASSES)
@pytest.mark.parametrize("model_type", [*TAKEN_AS_DECLARED, "qwen2", "phi3", "mistral"])
def test_the_class_is_the_one_that_transformers_itself_chooses(tmp_path, model_type, tokenizer_class):
    folder = declared(tmp_path, model_type, tokenizer_class)
    ours, theirs = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    assert type(ours) is type(theirs)
    text = ours.apply_chat_template(MESSAGES, tokenize=False)
    assert text == theirs.apply_chat_template(MESSAGES, tokenize=False)
    assert ours(text).input_ids == theirs(text).input_ids
    assert ours.eos_token_id == theirs.eos_token_id


def test_a_damaged_tokenizer_is_told_with_its_folder(tmp_path):
    folder = declared(tmp_path, "llama", "PreTrainedTokenizerFast")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=str(folder)):
        load_tokenizer(str(folder))


def test_a_router_knows_its_model_without_torch():
    run = subprocess.run([sys.executable, "-c", ROUTER], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split()[-1] == "False"
