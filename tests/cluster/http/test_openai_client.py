"""The real `openai` client: its helpers work, and our errors become its exceptions."""

import contextlib

import openai
import pytest
from pydantic import BaseModel

from cluster.config_values import TOOL_PARSERS
from cluster.errors import ApiError
from cluster.openai.served_model import ServedModel
from engine.errors import PromptTooLongError
from engine.text.tokenizer import Tokenizer
from tests import tiny_tokenizer
from tests.openai_app import MODEL, app_for, client_for, saying, serving

TEMPLATE = tiny_tokenizer.CHAT_TEMPLATE + "{#- reads tools -#}"
CHAT = [{"role": "user", "content": "hi"}]
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add", "strict": True, "parameters": PARAMETERS}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(str(tiny_tokenizer.save(tiny_tokenizer.byte_level(), folder, TEMPLATE)))
    given = {"max_model_len": 512, "vocab_size": tokenizer.vocab_size, "tool_parser": TOOL_PARSERS.load("hermes")}
    return ServedModel(MODEL, tokenizer, **given)


@contextlib.asynccontextmanager
async def client(source, model, key="k", **changes):
    """The client, strict about what answers look like, around the app without a network."""
    app = app_for(source, model, api_key="k", **changes)
    async with client_for(app) as http, openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key=key, max_retries=0, http_client=http, _strict_response_validation=True
    ) as found:  # fmt: skip
        yield found


FAILURES = [
    (ApiError("overloaded", "the queue is full", retry_after=3), openai.RateLimitError, 429),
    (ApiError("no_replica", "no replica is ready"), openai.InternalServerError, 503),
    (ApiError("replica_lost", "gone"), openai.InternalServerError, 503),
    (PromptTooLongError("prompt does not fit"), openai.BadRequestError, 400),
    (RuntimeError("a bug"), openai.InternalServerError, 500),
]


@pytest.mark.parametrize(("error", "kind", "status"), FAILURES, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("stream", [False, True])
async def test_failures_become_the_clients_exceptions(model, error, kind, status, stream):
    async with client(saying(model, "hello", hold=0, error=error), model) as found:
        with pytest.raises(kind) as caught:
            await found.chat.completions.create(model=MODEL, messages=CHAT, stream=stream)
    assert caught.value.status_code == status
    assert caught.value.request_id == caught.value.body["request_id"]
    assert ("retry-after" in caught.value.response.headers) == (status in (429, 503))


async def test_refusals_become_the_clients_exceptions(model):
    source = saying(model, "hello")
    async with client(source, model, max_body_bytes=2000) as found:
        ask = found.chat.completions.create
        with pytest.raises(openai.NotFoundError) as caught:
            await ask(model="gpt-5", messages=CHAT)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(model=MODEL, messages=CHAT, store=True)
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "store")
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(model=MODEL, messages=CHAT, extra_body={"guided_regex": "a"})
        assert caught.value.param == "guided_regex"
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(model=MODEL, messages=[{"role": "user", "content": "x" * 1200}])
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(model=MODEL, messages=[{"role": "user", "content": "x" * 3000}])
        assert caught.value.status_code == 413
        with pytest.raises(openai.NotFoundError):
            await found.files.list()
    async with client(source, model, key="wrong") as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.chat.completions.create(model=MODEL, messages=CHAT)
    assert not source.requests


async def test_extensions_go_through_extra_body(model):
    source = saying(model, "hello")
    extra = {"top_k": 5, "min_p": 0.1, "return_token_ids": True, "logit_bias": {"7": 1}}
    async with client(source, model) as found:
        answer = await found.chat.completions.create(model=MODEL, messages=CHAT, extra_body=extra)
    assert source.requests[0].params.top_k == 5
    assert answer.choices[0].token_ids[:-1] == model.tokenizer.encode("hello")


class Point(BaseModel):
    """What `parse` asks for."""

    x: int


async def test_the_parse_helper_gets_its_model(model):
    source = saying(model, '{"x": 3}')
    async with client(source, model) as found:
        answer = await found.chat.completions.parse(model=MODEL, messages=CHAT, response_format=Point)
        assert answer.choices[0].message.parsed == Point(x=3)
        async with found.chat.completions.stream(model=MODEL, messages=CHAT, response_format=Point) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == Point(x=3)
    assert [request.params.structured.kind for request in source.requests] == ["json_schema"] * 2


async def test_the_stream_helper_puts_calls_together(model):
    source = saying(model, 'Let me see.<tool_call>{"name": "add", "arguments": {"a": 12}}</tool_call>')
    async with (
        client(source, model) as found,
        found.chat.completions.stream(model=MODEL, messages=CHAT, tools=[TOOL]) as stream,
    ):
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    call = final.choices[0].message.tool_calls[0].function
    assert (call.name, call.parsed_arguments) == ("add", {"a": 12})
    assert (final.choices[0].message.content, final.choices[0].finish_reason) == ("Let me see.", "tool_calls")


async def test_strict_answers_of_every_kind(model):
    async with client(saying(model, "hello 🚀"), model) as found:
        plain = await found.completions.create(model=MODEL, prompt=["a", "b"], echo=True, n=2)
        assert [choice.text for choice in plain.choices] == ["ahello 🚀"] * 2 + ["bhello 🚀"] * 2
        scored = await found.completions.create(model=MODEL, prompt="a", logprobs=2)
        assert scored.choices[0].logprobs.text_offset[0] == 0
        chat = await found.chat.completions.create(model=MODEL, messages=CHAT, logprobs=True, top_logprobs=2)
        assert chat.choices[0].message.content == "hello 🚀"
        assert [card.id async for card in found.models.list()] == [MODEL]
        assert (await found.models.retrieve(MODEL)).id == MODEL


async def test_an_error_in_mid_stream_reaches_the_client_over_a_socket(model):
    source = saying(model, "hello", hold=2, error=ApiError("replica_lost", "no replica is left"))
    async with (
        serving(app_for(source, model)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as found,
    ):
        seen = ""
        with pytest.raises(openai.APIError, match="no replica is left") as caught:
            async for chunk in await found.completions.create(model=MODEL, prompt="x", stream=True):
                seen += chunk.choices[0].text
    assert seen == model.tokenizer.decode(model.tokenizer.encode("hello")[:2])
    assert caught.value.code == "replica_lost"
