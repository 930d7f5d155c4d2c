"""/tokenize, /detokenize and /version: what the server's tokenizer makes of text, chats and ids."""

import threading
from importlib.metadata import version

import pytest

from cluster.http import endpoints as tokens_endpoint
from tests.openai_app import MODEL, app_for, client_for, saying, served_model

CHAT = [{"role": "user", "content": "hi 🚀"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def app(model):
    return app_for(saying(model, "ok"), model)


async def post(app, path, **fields):
    async with client_for(app) as client:
        return await client.post(path, json=fields)


async def test_text_becomes_tokens_and_tokens_text(app, model):
    body = (await post(app, "/tokenize", model=MODEL, prompt="hello 🚀", return_token_strs=True)).json()
    ids = model.tokenizer.encode("hello 🚀")
    assert (body["tokens"], body["count"], body["max_model_len"]) == (ids, len(ids), 256)
    assert len(body["token_strs"]) == len(ids)
    assert body["token_strs"][0] == model.tokenizer.token_bytes(ids[0]).decode()
    back = (await post(app, "/detokenize", tokens=ids)).json()
    assert back == {"prompt": "hello 🚀"}


async def test_a_chat_is_tokenized_as_it_would_be_answered(app, model):
    source = saying(model, "ok")
    async with client_for(app_for(source, model)) as client:
        await client.post("/v1/chat/completions", json={"model": MODEL, "messages": CHAT})
        body = (await client.post("/tokenize", json={"messages": CHAT})).json()
    assert tuple(body["tokens"]) == source.requests[0].prompt_token_ids
    assert body["token_strs"] is None
    shown = (await post(app, "/detokenize", tokens=body["tokens"])).json()["prompt"]
    assert shown == "<|bos|><|user|>hi 🚀<|assistant|>"
    bare = (await post(app, "/tokenize", messages=CHAT, add_generation_prompt=False)).json()
    assert bare["tokens"] == body["tokens"][:-1]


async def test_the_empty_text_has_no_tokens(app):
    assert (await post(app, "/tokenize", prompt="")).json()["tokens"] == []
    assert (await post(app, "/detokenize", tokens=[])).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "gpt-5"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, 400, "add_generation_prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": CHAT, "chat_template": "x"}, 400, "chat_template"),
        ("/tokenize", {"messages": CHAT, "chat_template_kwargs": {"thinking": "much"}}, 400,
         "chat_template_kwargs.thinking"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [400]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1.0]}, 400, "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
    ],
)  # fmt: skip
async def test_bad_input_is_refused_by_name(app, path, fields, status, param):
    answer = await post(app, path, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


async def test_the_version_is_told(app):
    async with client_for(app) as client:
        assert (await client.get("/version")).json() == {"version": version("squadron")}


async def test_long_answers_are_written_beside_the_event_loop(app, model, monkeypatch):
    threads = []

    def watched(body):
        threads.append(threading.current_thread())
        return encoded(body)

    encoded = tokens_endpoint._encoded
    monkeypatch.setattr(tokens_endpoint, "_encoded", watched)
    text = "ab " * 10_000
    async with client_for(app) as client:
        answer = await client.post("/tokenize", json={"prompt": text, "return_token_strs": True})
        several = answer.json()
        none = await client.post("/tokenize", json={"prompt": ""})
    assert threads[0] is not threading.main_thread()
    assert several["tokens"] == model.tokenizer.encode(text)
    assert len(several["token_strs"]) == several["count"] > 8192
    assert "".join(several["token_strs"]).endswith(text)
    assert none.status_code == 200


async def test_no_more_tokens_become_text_than_a_context_holds(app, model):
    async with client_for(app) as client:
        most, more = [
            await client.post("/detokenize", json={"tokens": [9] * (model.max_model_len + extra)}) for extra in (0, 1)
        ]
    assert most.status_code == 200
    assert (more.status_code, more.json()["error"]["param"]) == (400, "tokens")
