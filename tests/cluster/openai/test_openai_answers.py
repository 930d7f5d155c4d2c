"""Completions and chats as clients see them: bodies, streams, logprobs, usage, stop strings, several choices."""

import json

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.openai_app import MODEL, app_for, client_for, events, saying, served_model

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"))


async def post(source, model, path, **fields):
    async with client_for(app_for(source, model)) as client:
        return await client.post(f"/v1/{path}", json={"model": MODEL, **fields})


async def stream(source, model, path, **fields):
    answer = await post(source, model, path, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = events(answer.text)
    assert found[-1] == "[DONE]"
    return found[:-1]


async def test_a_completion_is_what_the_openai_types_expect(model):
    source = saying(model, "hello 🙂 world", cached=2)
    answer = await post(source, model, "completions", prompt="say it", max_tokens=100)
    body = Completion.model_validate(answer.json(), strict=True)
    assert (body.object, body.model, body.choices[0].text) == ("text_completion", MODEL, "hello 🙂 world")
    assert body.choices[0].finish_reason == "stop"
    assert body.usage.prompt_tokens == len(model.tokenizer.encode("say it"))
    assert body.usage.completion_tokens == len(model.tokenizer.encode("hello 🙂 world")) + 1
    assert body.usage.total_tokens == body.usage.prompt_tokens + body.usage.completion_tokens
    assert body.usage.prompt_tokens_details.cached_tokens == 2
    assert answer.headers["x-request-id"] == body.id == source.requests[0].request_id


async def test_a_chat_is_what_the_openai_types_expect(model):
    source = saying(model, "hello there")
    answer = await post(source, model, "chat/completions", messages=CHAT)
    body = ChatCompletion.model_validate(answer.json(), strict=True)
    assert body.choices[0].message.content == "hello there"
    assert body.choices[0].message.role == "assistant"
    assert body.choices[0].finish_reason == "stop"
    prompt = model.tokenizer.render_chat(CHAT)
    assert list(source.requests[0].prompt_token_ids) == model.tokenizer.encode(prompt)
    assert source.requests[0].params.max_tokens is None


async def test_a_chat_stream_tells_role_text_and_end_in_chunks_of_their_own(model):
    chunks = await stream(saying(model, "héllo 🚀 you"), model, "chat/completions", messages=CHAT)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0] == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert "".join(choice["delta"]["content"] for choice in choices[1:-1]) == "héllo 🚀 you"
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks}) == 1
    assert "usage" not in chunks[0]


async def test_a_completion_stream_has_the_same_text_as_the_whole_answer(model):
    chunks = await stream(saying(model, "a 🚀 b\n\nc"), model, "completions", prompt="x", max_tokens=50)
    Completion.model_validate(chunks[-1], strict=True)  # only the last has a reason, which the type wants
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == "a 🚀 b\n\nc"
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]


@pytest.mark.parametrize(
    ("path", "prompt"), [("completions", {"prompt": "x"}), ("chat/completions", {"messages": CHAT})]
)
async def test_usage_comes_last_and_alone_when_it_is_asked_for(model, path, prompt):
    source = saying(model, "hello")
    chunks = await stream(source, model, path, stream_options={"include_usage": True}, **prompt)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    count = len(model.tokenizer.encode("hello")) + 1
    assert chunks[-1]["usage"]["completion_tokens"] == count
    assert chunks[-1]["usage"]["prompt_tokens"] == len(source.requests[0].prompt_token_ids)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_stop_string_ends_one_choice_and_the_others_go_on(model, streamed):
    texts = ("one STOP never", "two and more", "a STO P")
    source = saying(model, *texts)
    fields = {"prompt": "x", "n": 3, "stop": "STOP", "max_tokens": 100}
    if streamed:
        chunks = await stream(source, model, "completions", **fields)
        found = ["".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) for i in range(3)]
    else:
        answer = await post(source, model, "completions", **fields)
        found = [choice["text"] for choice in answer.json()["choices"]]
    assert found == ["one ", "two and more", "a STO P"]
    assert source.ended == [(source.requests[0].request_id, 0)]


async def test_usage_counts_tokens_up_to_the_one_that_completes_the_stop(model):
    source = saying(model, "one STOP never", chunk=50)
    answer = await post(source, model, "completions", prompt="x", stop=["STOP"], max_tokens=100)
    used = next(
        i for i in range(100) if "STOP" in model.tokenizer.decode(model.tokenizer.encode("one STOP never")[:i])
    )
    assert answer.json()["usage"]["completion_tokens"] == used
    assert answer.json()["choices"][0]["finish_reason"] == "stop"


async def test_choices_are_streamed_in_turns(model):
    chunks = await stream(saying(model, "aaaa", "bbbb"), model, "completions", prompt="x", n=2)
    order = [chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"][0]["text"]]
    assert order[:4] == [0, 1, 0, 1]


@pytest.mark.parametrize("streamed", [False, True])
async def test_several_prompts_run_at_once_and_are_numbered_prompt_by_prompt(model, streamed):
    eos = model.tokenizer.eos_token_id
    source = saying(model, "unused")
    source.script = lambda request, choice: [*request.prompt_token_ids, *model.tokenizer.encode(str(choice)), eos]
    fields = {"prompt": ["first", "second", "third"], "n": 2}
    if streamed:
        chunks = await stream(source, model, "completions", **fields)
        found = ["".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) for i in range(6)]
    else:
        answer = await post(source, model, "completions", **fields)
        found = [choice["text"] for choice in answer.json()["choices"]]
    assert found == ["first0", "first1", "second0", "second1", "third0", "third1"]
    assert sorted(source.closed) == sorted(request.request_id for request in source.requests)


@pytest.mark.parametrize("prompt", [[65, 66, 67], [[65, 66, 67]]])
async def test_prompts_may_be_token_ids(model, prompt):
    source = saying(model, "ok")
    await post(source, model, "completions", prompt=prompt)
    assert source.requests[0].prompt_token_ids == (65, 66, 67)


async def test_completion_logprobs_have_offsets_into_the_text(model):
    answer = await post(saying(model, "a🚀b"), model, "completions", prompt="x", logprobs=2)
    choice = Completion.model_validate(answer.json(), strict=True).choices[0]
    spelled = choice.logprobs
    assert spelled.tokens[0] == "a"
    assert spelled.tokens[1].startswith("bytes:\\xf0")
    assert spelled.tokens[-1] == "<|eos|>"
    assert spelled.text_offset[:2] == [0, 1]
    b = spelled.tokens.index("b")
    assert choice.text[spelled.text_offset[b] :] == "b"
    assert set(map(len, spelled.top_logprobs)) == {2}
    assert spelled.token_logprobs == [-0.5] * len(spelled.tokens)


@pytest.mark.parametrize("streamed", [False, True])
async def test_chat_logprobs_have_bytes_that_join_to_the_text(model, streamed):
    fields = {"messages": CHAT, "logprobs": True, "top_logprobs": 3}
    if streamed:
        chunks = await stream(saying(model, "a🚀b"), model, "chat/completions", **fields)
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        entries = [entry for part in parts if part for entry in part["content"]]
    else:
        answer = await post(saying(model, "a🚀b"), model, "chat/completions", **fields)
        ChatCompletion.model_validate(answer.json(), strict=True)
        entries = answer.json()["choices"][0]["logprobs"]["content"]
    shown = entries[:-1]
    assert bytes(byte for entry in shown for byte in entry["bytes"]).decode() == "a🚀b"
    assert entries[-1]["token"] == "<|eos|>"
    assert all(len(entry["top_logprobs"]) == 3 for entry in entries)


async def test_chat_logprobs_without_alternatives(model):
    answer = await post(saying(model, "ab"), model, "chat/completions", messages=CHAT, logprobs=True)
    assert answer.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_token_ids_are_returned_when_asked_for(model):
    ids = [*model.tokenizer.encode("a🚀b"), model.tokenizer.eos_token_id]
    answer = await post(saying(model, "a🚀b"), model, "completions", prompt="x", return_token_ids=True)
    assert answer.json()["choices"][0]["token_ids"] == ids
    chunks = await stream(saying(model, "a🚀b"), model, "completions", prompt="x", return_token_ids=True)
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])] == ids


async def test_text_that_was_held_for_a_stop_string_comes_out_at_the_end(model):
    chunks = await stream(saying(model, "abc"), model, "completions", prompt="x", stop=["cde"])
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc"


async def test_text_with_quotes_and_line_separators_survives_the_frames(model):
    text = 'say "x" \\ \u2028 \x01 </script> data: [DONE]'
    chunks = await stream(saying(model, text), model, "completions", prompt="x", max_tokens=200)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


async def test_every_parameter_reaches_the_engine(model):
    source = saying(model, "ok")
    sent = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "seed": -7, "stop": ["x", "y"], "stop_token_ids": [3],
        "min_tokens": 1, "max_tokens": 20, "ignore_eos": True, "n": 2, "logprobs": 4, "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }  # fmt: skip
    answer = await post(source, model, "completions", prompt="a", priority=-3, cache_salt="tenant", user="u", **sent)
    assert answer.status_code == 200, answer.text
    request = source.requests[0]
    reached = {name: getattr(request.params, name) for name in sent}
    assert json.loads(json.dumps(reached)) == sent
    assert (request.seed, request.priority, request.cache_salt) == (-7, -3, b"tenant")


async def test_requests_without_seed_get_different_ones(model):
    source = saying(model, "ok")
    for _ in range(2):
        await post(source, model, "completions", prompt="a")
    assert source.requests[0].seed != source.requests[1].seed


async def test_equal_prompts_without_seed_are_drawn_differently_and_with_one_alike(model):
    source = saying(model, "ok")
    await post(source, model, "completions", prompt=["a", "a", "a"], temperature=1)
    assert len({request.seed for request in source.requests}) == 3
    source = saying(model, "ok")
    await post(source, model, "completions", prompt=["a", "a"], temperature=1, seed=7)
    assert [request.seed for request in source.requests] == [7, 7]


async def test_content_parts_and_developer_messages_are_read(model):
    source = saying(model, "ok")
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts, "tool_calls": None}]
    answer = await post(source, model, "chat/completions", messages=messages)
    assert answer.status_code == 200, answer.text
    prompt = model.tokenizer.decode(source.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<|bos|><|system|>be kind<|user|>one\ntwo<|assistant|>"


async def test_a_chat_can_go_on_with_the_assistants_last_words(model):
    source = saying(model, "ok")
    messages = [*CHAT, {"role": "assistant", "content": "The answer is"}]
    await post(source, model, "chat/completions", messages=messages, continue_final_message=True)
    prompt = model.tokenizer.decode(source.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("<|assistant|>The answer is")


async def test_max_completion_tokens_is_todays_max_tokens(model):
    source = saying(model, "a long answer")
    answer = await post(source, model, "chat/completions", messages=CHAT, max_completion_tokens=2)
    assert source.requests[0].params.max_tokens == 2
    assert answer.json()["choices"][0]["finish_reason"] == "length"


async def test_a_priority_that_changes_nothing_is_refused(tmp_path):
    model = served_model(tmp_path, by_priority=False)
    for path, fields in (("completions", {"prompt": "a"}), ("embeddings", {"input": "a"})):
        answer = await post(saying(model, "ok"), model, path, priority=1, **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")
        answer = await post(saying(model, "ok"), model, path, priority=0, **fields)
        assert answer.status_code == 200, answer.text
