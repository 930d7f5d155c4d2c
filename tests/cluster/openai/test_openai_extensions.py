"""What goes beyond plain text: prompts echoed and scored, token ids, running usage, biases, formats, labels."""

import json
import threading

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from cluster.errors import ApiError
from engine.sampling_params import StructuredOutput
from engine.text.tokenizer import Tokenizer
from tests.openai_app import MODEL, app_for, client_for, events, saying, served_model

CHAT = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"))


async def post(source, model, path, **fields):
    async with client_for(app_for(source, model)) as client:
        return await client.post(f"/v1/{path}", json={"model": MODEL, **fields})


async def stream(source, model, path, **fields):
    answer = await post(source, model, path, stream=True, **fields)
    found = events(answer.text)
    assert found[-1] == "[DONE]", found
    return found[:-1]


async def test_the_prompt_is_echoed_before_every_choice(model):
    source = saying(model, "one", "two")
    answer = await post(source, model, "completions", prompt=["a🚀", [65, 66]], n=2, echo=True)
    second = model.tokenizer.decode([65, 66])
    texts = [choice["text"] for choice in answer.json()["choices"]]
    assert texts == ["a🚀one", "a🚀two", second + "one", second + "two"]
    chunks = await stream(saying(model, "one", "two"), model, "completions", prompt="a🚀", n=2, echo=True)
    for i, text in enumerate(("a🚀one", "a🚀two")):
        assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) == text


@pytest.mark.parametrize(
    ("prompt", "fields", "shown"),
    [
        (None, {}, "hi"),
        (None, {"skip_special_tokens": False}, "<|user|>hi"),
        ("<|user|>hi", {}, "<|user|>hi"),
        ("<|user|>hi", {"truncate_prompt_tokens": 100}, "hi"),
        ("a<|user|>hi", {"add_special_tokens": False}, "a<|user|>hi"),
    ],
)
async def test_an_echo_shows_a_text_as_sent_and_ids_with_special_tokens_if_asked(model, prompt, fields, shown):
    ids = model.tokenizer.encode("<|user|>hi", add_special_tokens=False)
    source = saying(model, "ok")
    answer = await post(source, model, "completions", prompt=prompt or ids, echo=True, logprobs=0, **fields)
    choice = answer.json()["choices"][0]
    assert choice["text"].removesuffix("<|eos|>") == f"{shown}ok"
    told = zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True)
    placed = [(name, offset) for name, offset in told if not name.startswith("<|")]
    assert [name for name, _ in placed][-2:] in (["hi", "ok"], ["i", "ok"], ["o", "k"]), placed
    assert all(choice["text"][offset:].startswith(name) for name, offset in placed)


@pytest.mark.parametrize("streamed", [False, True])
async def test_logprobs_0_tells_the_one_token_that_was_drawn(model, streamed):
    fields = {"prompt": "hi", "logprobs": 0}
    if streamed:
        chunks = await stream(saying(model, "ok"), model, "completions", **fields)
        found = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    else:
        body = (await post(saying(model, "ok"), model, "completions", **fields)).json()
        found = [body["choices"][0]["logprobs"]]
    for part in found:
        values = zip(part["tokens"], part["token_logprobs"], strict=True)
        assert part["top_logprobs"] == [{name: value} for name, value in values]


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_echoed_prompt_has_its_logprobs_before_the_outputs(model, streamed):
    fields = {"prompt": "héllo wörld", "echo": True, "logprobs": 2, "max_tokens": 50}
    if streamed:
        chunks = await stream(saying(model, "ok🚀"), model, "completions", **fields)
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
        told = {name: [one for part in parts for one in part[name]] for name in parts[0]}
    else:
        answer = await post(saying(model, "ok🚀"), model, "completions", **fields)
        text, told = answer.json()["choices"][0]["text"], answer.json()["choices"][0]["logprobs"]
    ids = [*model.tokenizer.encode("héllo wörld"), *model.tokenizer.encode("ok🚀"), model.tokenizer.eos_token_id]
    assert text == "héllo wörldok🚀"
    assert len(told["tokens"]) == len(told["text_offset"]) == len(ids)
    assert told["token_logprobs"] == [None] + [-0.5] * (len(ids) - 1)
    assert told["top_logprobs"][0] is None
    assert {len(best) for best in told["top_logprobs"][1:]} == {2}
    spelled = [(name, offset) for name, offset in zip(told["tokens"], told["text_offset"], strict=True)]
    whole = [(name, offset) for name, offset in spelled if not name.startswith(("bytes:", "<|"))]
    assert all(text[offset:].startswith(name) for name, offset in whole)


async def test_nothing_but_the_echo_is_told_of_max_tokens_0(model):
    source = saying(model, "never")
    fields = {"prompt": "hello", "echo": True, "max_tokens": 0, "logprobs": 1}
    answer = await post(source, model, "completions", **fields)
    body = answer.json()
    count = len(model.tokenizer.encode("hello"))
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("hello", "length")
    assert len(body["choices"][0]["logprobs"]["tokens"]) == count
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (count, 0)
    chunks = await stream(saying(model, "never"), model, "completions", **fields)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello"
    assert (await post(saying(model, "x"), model, "completions", prompt="a", max_tokens=0)).status_code == 400


async def test_prompt_logprobs_are_in_vllms_format(model):
    source = saying(model, "ok")
    fields = {"prompt": "hello there", "prompt_logprobs": 2, "n": 2}
    body = (await post(source, model, "completions", **fields)).json()
    ids = model.tokenizer.encode("hello there")
    for choice in body["choices"]:
        first, *told = choice["prompt_logprobs"]
        assert first is None
        assert [next(iter(one)) for one in told] == [str(token) for token in ids[1:]]
        own = {"logprob": -0.5, "rank": 1, "decoded_token": model.tokenizer.token_bytes(ids[1]).decode()}
        assert told[0][str(ids[1])] == own
        assert {len(one) for one in told} == {2}
    chat = (await post(saying(model, "ok"), model, "chat/completions", messages=CHAT, prompt_logprobs=0)).json()
    prompt = model.tokenizer.encode(model.tokenizer.render_chat(CHAT), add_special_tokens=False)
    assert len(chat["prompt_logprobs"]) == len(prompt)
    ranks = [one["rank"] for entry in chat["prompt_logprobs"][1:] for one in entry.values()]
    assert ranks == [token + 1 for token in prompt[1:]]


async def test_echo_shows_no_more_alternatives_than_were_asked_for(model):
    fields = {"prompt": "hello there", "prompt_logprobs": 5, "echo": True, "logprobs": 1}
    source = saying(model, "ok")
    choice = (await post(source, model, "completions", **fields)).json()["choices"][0]
    assert source.requests[0].params.prompt_logprobs == 5
    assert {len(one) for one in choice["prompt_logprobs"][1:]} == {5}
    assert {len(one) for one in choice["logprobs"]["top_logprobs"][1:]} == {1}


async def test_ids_of_the_prompt_come_with_those_of_the_output(model):
    ids = model.tokenizer.encode("hello")
    body = (await post(saying(model, "ok"), model, "completions", prompt="hello", return_token_ids=True)).json()
    assert body["choices"][0]["prompt_token_ids"] == ids
    chunks = await stream(saying(model, "ok", "no"), model, "completions", prompt="hello", n=2, return_token_ids=True)
    told = [chunk["choices"][0] for chunk in chunks if "prompt_token_ids" in chunk["choices"][0]]
    assert [(choice["index"], choice["prompt_token_ids"]) for choice in told] == [(0, ids), (1, ids)]
    prompt = model.tokenizer.encode(model.tokenizer.render_chat(CHAT), add_special_tokens=False)
    asked = {"messages": CHAT, "return_token_ids": True, "n": 2}
    body = (await post(saying(model, "ok"), model, "chat/completions", **asked)).json()
    assert body["prompt_token_ids"] == prompt
    for options in ({}, {"stream_options": {"include_usage": True}}):
        chunks = await stream(saying(model, "ok"), model, "chat/completions", **asked, **options)
        assert [chunk.get("prompt_token_ids") for chunk in chunks] == [prompt] + [None] * (len(chunks) - 1)


@pytest.mark.parametrize(
    ("path", "prompt"), [("completions", {"prompt": "x"}), ("chat/completions", {"messages": CHAT})]
)
async def test_usage_runs_along_when_it_is_asked_for(model, path, prompt):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(saying(model, "hello"), model, path, stream_options=options, **prompt)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert len(counts) > 3
    assert counts[-1] == counts[-2] == len(model.tokenizer.encode("hello")) + 1
    assert (counts[0], chunks[-1]["choices"]) == (0 if path.startswith("chat") else 1, [])


async def test_a_chunk_that_tells_only_a_role_counts_no_token(model):
    options = {"include_usage": True, "continuous_usage_stats": True}
    source = saying(model, "one", "two", cached=2)
    chunks = await stream(source, model, "chat/completions", messages=CHAT, n=2, stream_options=options)
    told = [(chunk["choices"][0]["delta"], chunk["usage"]) for chunk in chunks if chunk["choices"]]
    roles = [(number, usage) for number, (delta, usage) in enumerate(told) if "role" in delta]
    assert len(roles) == 2
    for number, usage in roles:
        before = told[number - 1][1]["completion_tokens"] if number else 0
        assert usage["completion_tokens"] == before
        assert usage["prompt_tokens"] == len(source.requests[0].prompt_token_ids)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 2
        assert told[number + 1][1]["completion_tokens"] > before


async def test_biases_and_bans_reach_the_engine(model):
    source = saying(model, "ok")
    fields = {"logit_bias": {"5": -100, "7": 1.5}, "allowed_token_ids": [5, 7], "bad_words": ["no", "never"]}
    answer = await post(source, model, "completions", prompt="a", **fields)
    assert answer.status_code == 200, answer.text
    params = source.requests[0].params
    assert params.logit_bias == ((5, -100.0), (7, 1.5))
    assert params.allowed_token_ids == (5, 7)
    assert params.bad_words == ("no", "never")
    assert tuple(model.tokenizer.encode("no")) in params.bad_words_ids


FORMATS = [
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", json.dumps(SCHEMA)),
    ({"structured_outputs": {"regex": "[ab]+"}}, "regex", "[ab]+"),
    ({"structured_outputs": {"choice": ["yes", "nö"]}}, "choice", '["yes", "nö"]'),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "grammar", 'root ::= "a"'),
    ({"structured_outputs": {"json_object": True}}, "json_object", ""),
    ({"response_format": {"type": "json_object"}}, "json_object", ""),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "description": "d", "schema": SCHEMA, "strict": True},
            }
        },
        "json_schema",
        json.dumps(SCHEMA),
    ),
]


@pytest.mark.parametrize(("fields", "kind", "text"), FORMATS, ids=lambda value: str(value)[:50])
async def test_formats_reach_the_engine(model, fields, kind, text):
    source = saying(model, "ok")
    answer = await post(source, model, "chat/completions", messages=CHAT, **fields)
    assert answer.status_code == 200, answer.text
    assert source.requests[0].params.structured == StructuredOutput(kind, text)


@pytest.mark.parametrize("field", ["response_format", "structured_outputs"])
async def test_what_the_engine_says_of_a_format_names_the_clients_field(model, field):
    value = {"type": "json_object"} if field == "response_format" else {"json_object": True}
    refusal = ApiError("invalid_value", "the schema is too deep", param="structured")
    source = saying(model, "ok", hold=0, error=refusal)
    answer = await post(source, model, "chat/completions", messages=CHAT, **{field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_truncation_keeps_the_end_of_the_prompt(model):
    ids = list(range(50, 90))
    source = saying(model, "ok")
    await post(source, model, "completions", prompt=ids, truncate_prompt_tokens=7)
    await post(source, model, "completions", prompt=ids * 10, truncate_prompt_tokens=-1, max_tokens=6)
    await post(source, model, "completions", prompt=ids, truncate_prompt_tokens=100)
    lengths = [len(request.prompt_token_ids) for request in source.requests]
    assert lengths == [7, model.max_model_len - 6, 40]
    assert source.requests[0].prompt_token_ids == tuple(ids[-7:])
    echoed = await post(source, model, "completions", prompt="hello world", truncate_prompt_tokens=2, echo=True)
    kept = model.tokenizer.decode(model.tokenizer.encode("hello world")[-2:])
    assert echoed.json()["choices"][0]["text"] == kept + "ok"


async def test_the_clients_request_id_in_the_body_is_echoed_and_nothing_else(model):
    source = saying(model, "ok")
    answer = await post(source, model, "completions", prompt="a", request_id="mine-7")
    assert answer.headers["x-request-id"] == "mine-7"
    assert answer.json()["request_id"] == "mine-7"
    assert answer.json()["id"] == source.requests[0].request_id != "mine-7"
    chunks = await stream(source, model, "completions", prompt="a", request_id="mine-8")
    assert {chunk["request_id"] for chunk in chunks} == {"mine-8"}


async def test_labels_change_nothing(model):
    labels = {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "metadata": {"a": "b"}}
    source = saying(model, "ok")
    bare = await post(source, model, "chat/completions", messages=CHAT, seed=1)
    labelled = await post(source, model, "chat/completions", messages=CHAT, seed=1, **labels)
    assert bare.json()["choices"] == labelled.json()["choices"]
    assert source.requests[0].params == source.requests[1].params
    assert source.requests[0].cache_salt == source.requests[1].cache_salt


async def test_whole_answers_with_everything_fit_the_openai_types(model):
    everything = {"return_token_ids": True, "prompt_logprobs": 1, "n": 2}
    plain = await post(saying(model, "ok"), model, "completions", prompt="hi", logprobs=2, **everything)
    Completion.model_validate(plain.json(), strict=True)
    asked = {"messages": CHAT, "logprobs": True, "top_logprobs": 2}
    chat = await post(saying(model, "ok"), model, "chat/completions", **asked, **everything)
    ChatCompletion.model_validate(chat.json(), strict=True)


@pytest.mark.parametrize(
    "fields",
    [{"prompt_logprobs": 1, "n": 2}, {"echo": True, "logprobs": 1}, {"echo": True, "logprobs": 1, "stream": True}],
    ids=["scored", "echoed", "streamed"],
)
async def test_many_log_probabilities_are_written_beside_the_event_loop(tmp_path, monkeypatch, fields):
    model, threads = served_model(tmp_path, max_model_len=4096), set()
    spell, place = Tokenizer.token_bytes, Tokenizer.text_streams

    def spelled(tokenizer, token):
        threads.add(threading.current_thread())
        return spell(tokenizer, token)

    def placed(tokenizer, params, prompt=None):
        if prompt is None:  # of an echo
            threads.add(threading.current_thread())
            return place(tokenizer, params)
        return place(tokenizer, params, prompt)

    monkeypatch.setattr(Tokenizer, "token_bytes", spelled)
    monkeypatch.setattr(Tokenizer, "text_streams", placed)
    answer = await post(saying(model, ""), model, "completions", prompt=[65, 66] * 1000, max_tokens=1, **fields)
    assert answer.status_code == 200, answer.text
    assert threads
    assert threading.main_thread() not in threads
    if "prompt_logprobs" in fields:
        choices = answer.json()["choices"]
        assert [len(choice["prompt_logprobs"]) for choice in choices] == [2000, 2000]
    else:
        assert answer.text.count('"text_offset"') == 1
