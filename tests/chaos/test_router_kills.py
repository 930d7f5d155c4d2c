"""kill -9 of the only router under answers of every kind: the next one goes on with all of them, and tells nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import openai

from tests.chaos.strike import Strike
from tests.chaos.test_kills import structured
from tests.e2e.harness import App, eventually, gone, kill, router_processes

TOKENS = 100
STREAMS = 8
BLOCK = 16  # tokens, `--block-size`
MESSAGES: list[Any] = [{"role": "user", "content": "Write a function."}]
LONG = {"ignore_eos": True}
Heard = Callable[[], None]


async def completion(client: openai.AsyncOpenAI, heard: Heard) -> Any:
    """Several prompts and choices with log-probabilities, drawn."""
    found: dict[int, list[Any]] = {}
    asked: dict[str, Any] = {"model": "demo", "prompt": ["def f(x):", "import "], "n": 2, "seed": 3, "logprobs": 2}
    async for chunk in await client.completions.create(stream=True, max_tokens=TOKENS, extra_body=LONG, **asked):
        heard()
        for choice in chunk.choices:
            own = found.setdefault(choice.index, ["", [], []])
            own[0] += choice.text
            own[1] += choice.logprobs.token_logprobs if choice.logprobs else []
            own[2] += [choice.finish_reason] if choice.finish_reason else []
    return found


async def grammar(client: openai.AsyncOpenAI, heard: Heard) -> Any:
    """JSON of a schema."""
    text = ""
    async for chunk in await client.completions.create(stream=True, **structured(1)):
        heard()
        text += chunk.choices[0].text
    return text


async def chat(client: openai.AsyncOpenAI, heard: Heard) -> Any:
    """A chat with usage; one role, one end."""
    found: list[Any] = ["", 0, [], None]
    options: Any = {"include_usage": True}
    asked: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "seed": 5, "max_tokens": TOKENS}
    async for chunk in await client.chat.completions.create(
        stream=True, stream_options=options, extra_body=LONG, **asked
    ):
        heard()
        for choice in chunk.choices:
            found[0] += choice.delta.content or ""
            found[1] += choice.delta.role is not None
            found[2] += [choice.finish_reason] if choice.finish_reason else []
        found[3] = chunk.usage.completion_tokens if chunk.usage else found[3]
    return found


async def response(client: openai.AsyncOpenAI, heard: Heard) -> Any:
    """A response: items and numbers go on."""
    text, numbers, items, last = "", [], set(), None
    asked: dict[str, Any] = {"model": "demo", "input": "Hello", "temperature": 0, "max_output_tokens": TOKENS}
    async for event in await client.responses.create(stream=True, extra_body=LONG, **asked):
        heard()
        numbers.append(event.sequence_number)
        if event.type == "response.output_text.delta":
            text += event.delta
            items.add(event.item_id)
        last = event
    assert numbers == list(range(len(numbers)))
    assert last is not None and last.type == "response.incomplete"
    assert last.response.output_text == text
    assert items == {last.response.output[0].id}
    return text


async def whole(client: openai.AsyncOpenAI, heard: Heard) -> Any:
    """An answer that is not streamed."""
    asked: dict[str, Any] = {"model": "demo", "prompt": "def g():", "seed": 8, "max_tokens": 300}
    answer = await client.completions.create(extra_body=LONG, **asked)
    return [(choice.text, choice.finish_reason) for choice in answer.choices], answer.usage.completion_tokens  # type: ignore[union-attr]


KINDS: Mapping[str, Callable[[openai.AsyncOpenAI, Heard], Awaitable[Any]]] = {
    "completion": completion,
    "grammar": grammar,
    "chat": chat,
    "response": response,
    "whole": whole,
}


async def all_kinds(app: App, heard: Heard) -> dict[str, Any]:
    """Ask for two answers of every kind at once."""
    async with openai.AsyncOpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0, timeout=90) as client:
        found = await asyncio.gather(*(kind(client, heard) for kind in KINDS.values() for _ in range(2)))
    assert found[::2] == found[1::2], "equal requests got different answers"
    return dict(zip(KINDS, found[::2], strict=True))


async def test_every_kind_of_answer_outlives_its_router(demo_app: App) -> None:
    undisturbed = await all_kinds(demo_app, lambda: None)
    victim = router_processes()[0]
    strike = Strike(300, lambda: kill(victim))
    disturbed = await all_kinds(demo_app, strike)
    assert strike.at, "all was answered before the kill"
    for kind, answer in undisturbed.items():
        assert disturbed[kind] == answer, kind
    demo_app.wait_whole()
    eventually(lambda: demo_app.metric("squadron_kv_cache_usage_perc") == 0, "all blocks are free")
    assert gone(victim.pid)


async def test_the_next_router_goes_on_where_the_blocks_are(demo_app: App) -> None:
    """A replica computes nothing again but what did not fill a block when the router died."""
    demo_app.wait_whole()

    def computed() -> float:
        return demo_app.metric("squadron_engine_prompt_tokens_total") - demo_app.metric(
            "squadron_prefix_cache_hits_total"
        )

    async def stream(client: openai.AsyncOpenAI, number: int, heard: Heard) -> tuple[str, int]:
        text, asked = "", 0
        options: Any = {"include_usage": True}
        prompt = f"# {number}\n" + f"def f{number}(x):\n    return x + {number}\n" * 25
        async for chunk in await client.completions.create(
            model="demo", prompt=prompt, temperature=0, max_tokens=300, stream=True, stream_options=options,
            extra_body=LONG,
        ):  # fmt: skip
            heard()
            text += "".join(choice.text for choice in chunk.choices)
            asked = chunk.usage.prompt_tokens if chunk.usage else asked
        return text, asked

    async def streams(heard: Heard) -> list[tuple[str, int]]:
        async with openai.AsyncOpenAI(base_url=f"{demo_app.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(stream(client, number, heard) for number in range(STREAMS)))

    before = computed()
    victim = router_processes()[0]
    strike = Strike(STREAMS * 100, lambda: kill(victim))
    disturbed = await streams(strike)
    assert strike.at, "all was answered before the kill"
    demo_app.wait_whole()
    prompts = sum(asked for _, asked in disturbed)
    again = computed() - before - prompts
    assert again <= STREAMS * BLOCK, f"{again:g} tokens were computed again, of {prompts} and {STREAMS * 300}"
    assert await streams(lambda: None) == disturbed
