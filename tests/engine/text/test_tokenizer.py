"""Text to ids, conversations to prompts, what a client hears when that is wrong; a router needs no torch for it."""

import json
import subprocess
import sys
import threading
import time

import pytest
from transformers import AutoTokenizer

from engine.errors import CheckpointError, ConfigError, InvalidRequestError
from engine.text.tokenizer import (
    GENERIC_CLASSES,
    LONG_TEXT,
    TAKEN_AS_DECLARED,
    Tokenizer,
    load_tokenizer,
    read_chat_template,
)
from tests import tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_tokenizer.save(tiny_tokenizer.byte_level(), tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer(str(folder))


@pytest.mark.parametrize("text", ["", "hello world", "<|user|>hi<|eos|>", "🙂 naïve\n\n", "x" * (LONG_TEXT + 1)])
def test_ids_are_those_of_transformers(tokenizer, folder, text):
    assert tokenizer.encode(text) == AutoTokenizer.from_pretrained(folder)(text).input_ids


def test_decoding_gives_the_text_back(tokenizer):
    text = "hello 🙂 wörld\n\n 東京"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_skipped_or_shown(tokenizer):
    ids = tokenizer.encode("<|user|>hi<|eos|>")
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|user|>hi<|eos|>"


def test_half_a_surrogate_pair_is_refused_with_its_place_and_field(tokenizer):
    with pytest.raises(InvalidRequestError, match=r"messages is not valid Unicode.*character 3") as caught:
        tokenizer.encode("abc\ud83d", param="messages")
    assert caught.value.param == "messages"


def test_a_long_text_leaves_the_interpreter_to_other_threads(tokenizer):
    text = "hello world, this is a text. " * 20_000
    encoding = threading.Event()
    turns = 0

    def watch():
        nonlocal turns
        while encoding.is_set():
            turns += 1
            time.sleep(0.001)

    encoding.set()
    watcher = threading.Thread(target=watch)
    watcher.start()
    before = turns
    tokenizer.encode(text)
    had = turns - before
    encoding.clear()
    watcher.join()
    assert had > 2, "the other thread had a turn before and after it at most"


def test_many_threads_can_share_one_tokenizer(tokenizer):
    texts = [f"thread {i} says 🙂 hello world " * (i + 1) for i in range(64)]
    expected = [tokenizer.encode(text) for text in texts]
    found = [None] * len(texts)

    def work(i):
        found[i] = tokenizer.encode(texts[i])
        assert tokenizer.decode(found[i]) == texts[i]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_a_conversation_becomes_the_models_own_prompt(tokenizer):
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages) == "<|bos|><|system|>be kind<|user|>hi<|assistant|>"
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == "<|bos|><|system|>be kind<|user|>hi"
    assert tokenizer.render_chat(messages, options={"enable_thinking": True}).endswith("<|assistant|><think>")


def test_what_the_template_refuses_is_the_clients_error(tokenizer):
    with pytest.raises(InvalidRequestError, match="no role robot") as caught:
        tokenizer.render_chat([{"role": "robot", "content": "hi"}])
    assert (caught.value.param, caught.value.code) == ("messages", "chat_template_error")


def test_a_template_cannot_leave_its_sandbox(tmp_path):
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    evil = Tokenizer(str(tiny_tokenizer.save(tiny_tokenizer.byte_level(), tmp_path, escape)))
    with pytest.raises(InvalidRequestError, match="unsafe"):
        evil.render_chat([{"role": "user", "content": "hi"}])


TURNS = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


@pytest.mark.parametrize("in_a_file", [True, False])
def test_a_given_template_stands_in_for_the_models_own(tmp_path, in_a_file):
    given = TURNS
    if in_a_file:
        given = str(tmp_path / "mine.jinja")
        (tmp_path / "mine.jinja").write_text(TURNS)
    folder = str(tiny_tokenizer.save(tiny_tokenizer.byte_level(), tmp_path, "{{ 'own' }}"))
    messages = [{"role": "user", "content": "hi"}]
    assert Tokenizer(folder).render_chat(messages) == "own"
    found = Tokenizer(folder, read_chat_template(given))
    assert found.chat_template == TURNS
    assert found.render_chat(messages) == Tokenizer(folder).render_chat(messages, template=TURNS) == "<user>hi"
    assert found.decode(found.encode_chat(messages)) == "<user>hi"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            "no/such/file.jinja",
            r"chat_template: no/such/file\.jinja cannot be read: No such file.*; give a file of Jinja",
        ),
        ("{% for m in messages %}", r"chat_template: .* is no Jinja: .*endfor"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_with_the_flag(given, told):
    with pytest.raises(ConfigError, match=told) as caught:
        read_chat_template(given)
    assert caught.value.flag == "chat_template"


def test_a_model_without_chat_template_says_so(tmp_path):
    plain = Tokenizer(str(tiny_tokenizer.save(tiny_tokenizer.byte_level(), tmp_path, None)))
    with pytest.raises(InvalidRequestError, match="has no chat template; send a plain prompt") as caught:
        plain.render_chat([{"role": "user", "content": "hi"}])
    assert (caught.value.param, caught.value.code) == ("messages", "chat_template_missing")


def test_a_folder_without_tokenizer_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        Tokenizer(str(tmp_path))


def test_truncation_saved_with_a_tokenizer_does_not_cut_prompts(tmp_path):
    backend = tiny_tokenizer.byte_level()
    backend.enable_truncation(3)
    cut = Tokenizer(str(tiny_tokenizer.save(backend, tmp_path)))
    assert cut.decode(cut.encode("hello world, a longer text")) == "hello world, a longer text"


MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "<|eos|> 🙂 naïve\n\n"}]

ROUTER = """
import sys
import cluster.deployments.router_host
from cluster.config import resolve_config
from cluster.router.models import served_model

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
