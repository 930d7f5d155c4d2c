"""The built-in demo model is small, renders a chat, answers what it was taught, and stops."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from deploy import demo
from deploy.demo import demo_model_path


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model waits for its threads where the cores are busy
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_model_path())


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)


def answer(model, tokenizer, question, max_new_tokens=120):
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


def test_the_folder_is_small_and_complete():
    sizes = {path.name: path.stat().st_size for path in demo_model_path().iterdir()}
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert expected <= sizes.keys()
    assert sum(sizes.values()) <= 10.5e6


def test_the_model_runs_in_float32_and_divides_over_four_ranks():
    config = AutoConfig.from_pretrained(demo_model_path())
    assert config.dtype == torch.float32
    assert config.num_key_value_heads % 4 == config.intermediate_size % 4 == config.vocab_size % 4 == 0


def test_the_chat_template_renders_each_role(tokenizer):
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi "},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|bos|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>Hello!<|end|><|user|>Bye<|end|><|assistant|>"
    )


def test_the_chat_template_refuses_an_unknown_role(tokenizer):
    with pytest.raises(Exception, match="not wizard"):
        tokenizer.apply_chat_template([{"role": "wizard", "content": "Hi"}], tokenize=False)


def test_text_survives_the_tokenizer(tokenizer):
    text = "def f(x):\n\treturn 'é, 日本, 🐍'  # done"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("Hello!", "Squadron demo model"),
        ("What does os.path.join do?", "Join two or more pathname components"),
        ("What does json.dumps do?", "Serialize"),
    ],
)
def test_a_greedy_answer_is_recognisable_and_stops(model, tokenizer, question, words):
    tokens = answer(model, tokenizer, question)
    assert words in tokenizer.decode(tokens, skip_special_tokens=True)
    assert tokens[-1] in model.generation_config.eos_token_id
    assert len(tokens) < 120


def test_a_story_makes_a_long_stream(model, tokenizer):
    assert len(answer(model, tokenizer, "Tell me a story.", max_new_tokens=220)) >= 200


def test_a_missing_folder_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "demo.py"))
    with pytest.raises(FileNotFoundError, match="train_demo"):
        demo_model_path()
