"""Tokens of a call in an order that depends on the tokens alone: not on how they came, nor on who came first."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from cluster.token_source import TokenChunk

Chunks = AsyncIterator[tuple[int, TokenChunk]]


async def token_by_token(
    chunks: Chunks, order: list[tuple[int, int]], is_done: Callable[[int, int], bool]
) -> AsyncGenerator[tuple[int, TokenChunk], None]:
    """Yield the chunks of a call cut into single tokens, the choices taking turns at each position.

    order: all (request number, choice) of the call. is_done: whether a choice takes no more tokens. What comes before
    its turn waits here: as much as one choice is ahead of another.
    """
    waiting: dict[tuple[int, int], deque[TokenChunk]] = {key: deque() for key in order}
    turn = 0
    async with aclosing(cast("AsyncGenerator[tuple[int, TokenChunk], None]", chunks)) as coming:
        async for number, chunk in coming:
            if chunk.prompt_logprobs:
                bare = replace(chunk, token_ids=(), logprobs=(), finish_reason=None)
                yield number, bare
            waiting[number, chunk.choice].extend(_cut(chunk))
            while order:
                turn %= len(order)
                key = order[turn]
                if waiting[key]:
                    yield key[0], (one := waiting[key].popleft())
                    ended = one.finish_reason is not None or is_done(*key)
                elif is_done(*key):
                    ended = True
                else:
                    break
                if ended:
                    order.pop(turn)
                else:
                    turn += 1


def _cut(chunk: TokenChunk) -> Iterator[TokenChunk]:
    if not chunk.token_ids and chunk.finish_reason is None:
        return
    last = max(len(chunk.token_ids) - 1, 0)
    for i in range(last + 1):
        yield replace(
            chunk,
            token_ids=chunk.token_ids[i : i + 1],
            logprobs=chunk.logprobs[i : i + 1],
            finish_reason=chunk.finish_reason if i == last else None,
            prompt_logprobs=(),
        )
