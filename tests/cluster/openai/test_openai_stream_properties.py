"""Streams and whole answers say the same, whatever the text is and however its tokens fall."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fake_source import FakeSource
from tests.openai_app import MODEL, app_for, client_for, events, served_model

PIECES = st.sampled_from(
    ["a", " b", "STOP", "ST", "OP", "STO", "🚀", "👩‍👩‍👧", "🇩🇪", "é", "e\u0301", "東京", "\n\n",
     "data: ", '"', "\\", "<|eos|>", "\u2028", "\x00"]
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=12).map("".join)
RAW = st.lists(st.integers(5, 399), max_size=12)  # any tokens: halves of characters, invalid UTF-8
STOPS = st.lists(st.sampled_from(["STOP", "OP", "🚀", "\n\n", "a b", "é"]), max_size=3, unique=True)
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(model):
    """The app, and the source that tests tell what to say."""
    source = FakeSource(lambda *_: (), eos=model.tokenizer.eos_token_id)
    return app_for(source, model), source


async def both(app, path, body):
    """The whole answer and the stream of one request."""
    async with client_for(app) as client:
        whole = await client.post(path, json=body)
        streamed = await client.post(path, json=body | {"stream": True, "stream_options": {"include_usage": True}})
    assert (whole.status_code, streamed.status_code) == (200, 200), whole.text
    found = events(streamed.text)
    assert found[-1] == "[DONE]"
    return whole.json(), found[:-1]


def joined(chunks, index, chat):
    """What a client makes of one choice's chunks; every chunk is what it may be at its place."""
    choices = [one for chunk in chunks for one in chunk["choices"] if one["index"] == index]
    assert [one["finish_reason"] is None for one in choices] == [True] * (len(choices) - 1) + [False]
    if chat:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert choices[-1]["delta"] == {}
        assert all(set(one["delta"]) == {"content"} for one in choices[1:-1])
        text = "".join(one["delta"].get("content", "") for one in choices)
        parts = [one["logprobs"]["content"] for one in choices if one["logprobs"]]
        logprobs = [entry for part in parts for entry in part]
    else:
        text = "".join(one["text"] for one in choices)
        parts = [one["logprobs"] for one in choices if one["logprobs"]]
        logprobs = (
            {name: [entry for part in parts for entry in part[name] or ()] for name in parts[0]} if parts else {}
        )
    ids = [token for one in choices for token in one.get("token_ids", ())]
    return text, choices[-1]["finish_reason"], logprobs, ids


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    plans=st.lists(TEXTS | RAW, min_size=1, max_size=3),
    stops=STOPS,
    chunk=st.integers(1, 4),
    max_tokens=st.integers(1, 40),
    details=st.booleans(),
    include_stop=st.booleans(),
    echo=st.booleans(),
)
@pytest.mark.parametrize("chat", [True, False])
def test_deltas_join_to_the_whole_answer(
    model, served, chat, plans, stops, chunk, max_tokens, details, include_stop, echo
):
    eos = model.tokenizer.eos_token_id
    tokens = [[*(model.tokenizer.encode(plan) if isinstance(plan, str) else plan), eos] for plan in plans]
    app, source = served
    source.script, source.chunk = lambda _, choice: tokens[choice], chunk
    body = {"model": MODEL, "n": len(plans), "stop": stops, "max_tokens": max_tokens, "seed": 1}
    body |= {"include_stop_str_in_output": include_stop, "return_token_ids": details}
    if chat:
        body |= {"messages": CHAT, "logprobs": details}
    else:
        body |= {"prompt": "p🚀", "echo": echo} | ({"logprobs": 1} if details else {})
    path = "/v1/chat/completions" if chat else "/v1/completions"
    whole, chunks = asyncio.run(both(app, path, body))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        text, reason, logprobs, ids = joined(chunks, choice["index"], chat)
        assert text == (choice["message"]["content"] if chat else choice["text"])
        assert reason == choice["finish_reason"]
        assert ids == choice.get("token_ids", [])
        if choice["logprobs"] is not None:
            assert logprobs == (choice["logprobs"]["content"] if chat else choice["logprobs"])
        for stop in stops:
            assert include_stop or stop not in (text if chat or not echo else text.removeprefix("p🚀"))


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30), chunk=st.integers(1, 5))
def test_any_text_survives_the_wire(model, served, text, chunk):
    eos = model.tokenizer.eos_token_id
    app, source = served
    source.script, source.chunk = lambda *_: [*model.tokenizer.encode(text), eos], chunk
    body = {"model": MODEL, "prompt": "x", "max_tokens": 250, "skip_special_tokens": False}
    whole, chunks = asyncio.run(both(app, "/v1/completions", body))
    assert whole["choices"][0]["text"] == text
    assert joined(chunks, 0, chat=False)[0] == text
