"""A bound on thinking: where it falls, what follows, and that another router comes to the same."""

import asyncio
from dataclasses import replace

import pytest

from cluster.admission.admission_queue import AdmissionConfig, AdmissionQueue
from cluster.openai.parsers.reasoning import DeepSeekR1Parser, GptOssParser, Qwen3Parser
from tests.cluster.cluster_lab import until
from tests.fake_source import FakeSource
from tests.openai_app import MODEL, app_for, client_for, events, served_model

CHAT = [{"role": "user", "content": "hi"}]
LONG = "<think>\nhm, so it is or it is not and so on\n</think>\n\nYes"
END = "\n</think>\n\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"), max_model_len=1024, reasoning_parser=Qwen3Parser)


def thinking_source(model, answer="No", chunk=1, **changes):
    """Says `LONG`; where its thinking was ended, `answer`."""
    tokenizer, eos = model.tokenizer, model.tokenizer.eos_token_id
    long, short = [*tokenizer.encode(LONG), eos], [*tokenizer.encode(answer), eos]

    class Source(FakeSource):
        def _plan(self, request, choice):
            if request.resume is None:
                return super()._plan(request, choice)
            log = list(request.resume[choice])
            goes_on = log == long[: len(log)]
            given = replace(request, resume=None)
            return super()._plan(given, choice)[len(log) :] if goes_on else short

    return Source(lambda *_: long, eos=eos, chunk=chunk, **changes)


async def asked(source, model, **fields):
    async with client_for(app_for(source, model)) as client:
        return await client.post("/v1/chat/completions", json={"model": MODEL, "messages": CHAT} | fields)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
async def test_thinking_ends_after_its_budget_however_tokens_come(model, chunk):
    source = thinking_source(model, chunk=chunk)
    body = (await asked(source, model, thinking_token_budget=12, max_tokens=300)).json()
    ids, end = model.tokenizer.encode(LONG), model.tokenizer.encode(END)
    first, second = source.requests
    assert second.resume == {0: (*ids[:12], *end)}
    assert second.prompt_token_ids == first.prompt_token_ids
    assert second.seed == first.seed
    assert source.closed == [first.request_id, second.request_id]
    message, usage = body["choices"][0]["message"], body["usage"]
    thought = model.tokenizer.decode(ids[:12]).removeprefix("<think>").strip()
    assert (message["reasoning_content"], message["content"]) == (thought, "No")
    assert usage["completion_tokens"] == 12 + len(end) + len(model.tokenizer.encode("No")) + 1
    streamed = (await asked(thinking_source(model, chunk=chunk), model, thinking_token_budget=12, stream=True)).text
    deltas = [one["choices"][0]["delta"] for one in events(streamed)[:-1]]
    assert "".join(one.get("reasoning_content") or "" for one in deltas) == thought
    assert "".join(one.get("content") or "" for one in deltas) == "No"


@pytest.mark.parametrize("chunk", [1, 5, 100])
async def test_thinking_that_ends_by_itself_is_left_alone(model, chunk):
    source = thinking_source(model, chunk=chunk)
    budget = len(model.tokenizer.encode(LONG)) - 1  # within the answer
    body = (await asked(source, model, thinking_token_budget=budget)).json()
    assert body["choices"][0]["message"]["content"] == "Yes"
    assert len(source.requests) == 1


async def test_where_there_is_no_room_for_the_answer_the_output_ends(model):
    source = thinking_source(model)
    body = (await asked(source, model, thinking_token_budget=12, max_tokens=14)).json()
    assert (body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]) == ("length", 14)
    assert len(source.requests) == 1


async def test_a_stop_string_ends_the_answer_behind_the_thinking(model):
    source = thinking_source(model, answer="No, never")
    body = (await asked(source, model, thinking_token_budget=12, stop=["never"])).json()
    assert body["choices"][0]["message"]["content"] == "No, "
    assert source.ended == [(source.requests[1].request_id, 0)]


async def test_what_follows_the_thinking_waits_in_no_line(model):
    """It is the same answer: no other request that came meanwhile is let in before it, and nothing refuses it."""
    source = thinking_source(model, hold=3)
    queue = AdmissionQueue(source, lambda: 1, AdmissionConfig(max_waiting=1))
    async with client_for(app_for(source, model, admission=queue)) as client:
        fields = {"model": MODEL, "messages": CHAT, "max_tokens": 40}
        calls = [client.post("/v1/chat/completions", json=fields | {"thinking_token_budget": 12})]
        calls.append(client.post("/v1/chat/completions", json=fields))
        first = asyncio.create_task(calls[0])
        await until(lambda: source.requests)
        second = asyncio.create_task(calls[1])
        await until(lambda: queue.num_waiting == 1)
        source.go.set()
        assert [answer.status_code for answer in await asyncio.gather(first, second)] == [200, 200]
    thinking, answering, other = [request.request_id for request in source.requests]
    assert answering.partition("@")[0] == thinking != other
    assert queue.num_inside == 0


async def test_what_follows_the_thinking_is_of_the_same_model_and_conversation(model):
    """While replicas are replaced, some run another model."""

    class Source(type(thinking_source(model))):
        def _chunk(self, *given):
            return replace(super()._chunk(*given), fingerprint="the first")

    plain = thinking_source(model)
    source = Source(plain.script, eos=plain.eos)
    async with client_for(app_for(source, model)) as client:
        fields = {"model": MODEL, "messages": CHAT, "thinking_token_budget": 12}
        headers = {"x-session-id": "mine"}
        answer = await client.post("/v1/chat/completions", json=fields, headers=headers)
    assert answer.status_code == 200, answer.text
    told = [(context.session_id, context.fingerprint) for context in source.contexts]
    assert told == [("mine", None), ("mine", "the first")]


@pytest.mark.parametrize("parser", [Qwen3Parser, DeepSeekR1Parser, GptOssParser])
def test_what_is_put_in_the_models_place_ends_the_thinking(parser):
    reading = parser()
    reading.feed(f"{parser.opening}hm")
    assert reading.within
    said = reading.feed(f"{parser.forced_end()}Yes")
    assert (said.content, reading.within) == ("Yes", False)


@pytest.mark.parametrize(
    "fields", [{"n": 2}, {"logprobs": True}, {"prompt_logprobs": 1}, {"separate_reasoning": False}], ids=str
)
async def test_what_it_does_not_go_with_is_refused(model, fields):
    answer = await asked(thinking_source(model), model, thinking_token_budget=12, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking_token_budget")


async def test_beside_structured_output_it_is_a_hint(model):
    fields = {"thinking_token_budget": 12, "response_format": {"type": "json_object"}}
    answer = await asked(thinking_source(model), model, **fields)
    assert (answer.status_code, answer.headers["x-squadron-ignored"]) == (200, "thinking_token_budget")
    refused = await asked(thinking_source(model), replace(model, strict_fields=True), **fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "thinking_token_budget")


@pytest.mark.parametrize("budget", [-1, 2**40, 1.5, "12"])
async def test_budgets_that_are_none_are_refused_by_name(model, budget):
    answer = await asked(thinking_source(model), model, thinking_token_budget=budget)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking_token_budget")


async def test_anthropics_budget_is_the_same(model):
    source = thinking_source(model)
    async with client_for(app_for(source, model)) as client:
        wanted = {"type": "enabled", "budget_tokens": 12}
        body = {"model": MODEL, "messages": CHAT, "max_tokens": 300, "thinking": wanted}
        answer = await client.post("/v1/messages", json=body)
    thought, said = answer.json()["content"]
    assert (thought["type"], said["text"]) == ("thinking", "No")
    assert answer.json()["stop_reason"] == "end_turn"
    assert len(source.requests) == 2
