"""Answers in one piece: what is not streamed, by HTTP or in a batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from cluster.openai.call import Call
from cluster.openai.collected import Collected
from cluster.openai.deltas import Delta, Usage
from cluster.openai.frames import Frames
from cluster.openai.generation import MANY_LOGPROBS, Generation


async def whole_body(call: Call, generation: Generation, deltas: AsyncIterator[Delta], frames: Frames) -> bytes:
    """Return the JSON body of a call's answer, once all its choices are done."""
    collected = [Collected() for _ in range(generation.num_choices)]
    async for delta in deltas:
        collected[delta.choice].add(delta)
    usage = generation.usage

    def body() -> bytes:
        return frames.body([frames.choice(i, *one.whole(i)) for i, one in enumerate(collected)], usage)

    many = _num_logprobs(call, usage) > MANY_LOGPROBS
    return await asyncio.to_thread(body) if many else body()


def _num_logprobs(call: Call, usage: Usage) -> int:
    """Tokens of a whole answer whose log-probabilities are told, at least."""
    output = usage.completion_tokens if call.params.logprobs is not None else 0
    return output + (usage.prompt_tokens if call.params.prompt_logprobs is not None else 0)
