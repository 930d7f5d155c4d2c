"""From tasks to engine requests, by the validator of every ingress, in an order that uses the prefix cache."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from cluster.batch.rows import CHAT, COMPLETIONS, EMBEDDINGS, Task
from cluster.errors import ApiError
from cluster.openai.call import Call, Parse, build_requests
from cluster.openai.embeddings import EmbeddingCall, embedding_call
from cluster.openai.served_model import ServedModel
from cluster.openai.validation import parse_chat, parse_completion
from engine.errors import InvalidRequestError
from engine.request import Request

logger = logging.getLogger(__name__)
_PARSE: Mapping[str, tuple[Parse, str]] = {CHAT: (parse_chat, "chatcmpl-"), COMPLETIONS: (parse_completion, "cmpl-")}
FIRST_WINDOW = 32  # rows: the first ones start before many are read
# Of prompts and of whole rows, in a window and read ahead of it: some 10 MB each, a few times 8 MiB of large rows.
WINDOW_TOKENS = 250_000
WINDOW_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Prepared:
    """A task that can be run; its body is not kept. num_bytes: of the row, which is much of what this holds."""

    task: Task
    call: Call | EmbeddingCall
    requests: tuple[Request, ...]
    num_bytes: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all its prompts."""
        return sum([len(request.prompt_token_ids) for request in self.requests])

    @property
    def num_sequences(self) -> int:
        """Sequences that it runs as."""
        return len(self.requests) * (1 if isinstance(self.call, EmbeddingCall) else self.call.params.n)

    @property
    def is_resumable(self) -> bool:
        """Whether the answer can go on from its tokens alone: it holds nothing else of its prompt's tokens.

        Not where its thinking may be ended for it: more may have been drawn than count.
        """
        call = self.call
        if isinstance(call, EmbeddingCall) or call.thinking_budget is not None:
            return False
        return call.params.prompt_logprobs is None and not call.echo


@dataclass(frozen=True, slots=True)
class Preparer:
    """Makes tasks ready: everything that decides an answer follows from what is given here and the row's number.

    job: in few characters; equal for equal jobs; answers are named by it. seed: rows that bring none draw by it and
    their number. created: seconds since 1970. salt_of: makes a row's salt of the prefix cache that of its tenant.
    priority: in place of the rows' own. None = as the rows say. lot: what sets the draws apart from those of another
    batch with the same seed; "" = nothing. tenant: who is charged. logged: fields that had no use and were logged.
    """

    model: ServedModel
    job: str
    seed: int
    created: int
    salt_of: Callable[[bytes], bytes] | None = None
    priority: int | None = None
    lot: str = ""
    tenant: str = ""
    logged: set[str] = field(default_factory=set)

    def prepare(self, task: Task) -> Prepared:
        """Check and tokenize; raises `ApiError` or `InvalidRequestError` in the words of the row's own fields."""
        if task.problem:
            raise ApiError("invalid_request", task.problem, param=task.param)
        if task.url == EMBEDDINGS:
            embedding = embedding_call(task.body, self.model)
            self._log_ignored(task, embedding.ignored)
            own = self._own(embedding.requests)
            return _prepared(task, replace(embedding, requests=own), own)
        parse, prefix = _PARSE[task.url]
        parsed = parse(task.body, self.model)
        self._log_ignored(task, parsed.ignored)
        seed = parsed.seed if parsed.params.seed is not None else _number(self.lot, self.seed, task.row, b"seed") >> 1
        name = f"{prefix}{_number(self.job, self.seed, task.row, b'id'):016x}"
        call = replace(parsed, request_id=name, seed=seed, created=self.created, tells_cache=False)
        try:
            requests = build_requests(call, self.model)
        except (ApiError, InvalidRequestError) as error:
            raise call.clients_error(error) from error
        return _prepared(task, call, self._own(requests))

    def _log_ignored(self, task: Task, names: Sequence[str]) -> None:
        """An answer's line has no place for them, so the log names each once."""
        for name in names:
            if name not in self.logged:
                self.logged.add(name)
                logger.info("row %d sends %s, which has no use here; other rows may, too", task.row, name)

    def _own(self, requests: Sequence[Request]) -> tuple[Request, ...]:
        """Return requests with what the row does not decide."""
        return tuple(
            replace(
                one,
                cache_salt=one.cache_salt if self.salt_of is None else self.salt_of(one.cache_salt),
                priority=one.priority if self.priority is None else self.priority,
                tenant=self.tenant,
            )
            for one in requests
        )


def _prepared(task: Task, call: Call | EmbeddingCall, requests: tuple[Request, ...]) -> Prepared:
    return Prepared(replace(task, body={}), call, requests)


def _number(of: str, seed: int, row: int, purpose: bytes) -> int:
    """64 bits for a row."""
    text = f"{of}:{seed}:{row}".encode()
    return int.from_bytes(blake2b(text, digest_size=8, person=purpose).digest(), "little")


class _Load:
    """What rows take that are held."""

    def __init__(self) -> None:
        self._tokens = 0
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        return self._tokens >= WINDOW_TOKENS or self._bytes >= WINDOW_BYTES

    def add(self, row: Prepared) -> None:
        self._tokens += row.num_prompt_tokens
        self._bytes += row.num_bytes

    def remove(self, row: Prepared) -> None:
        self._tokens -= row.num_prompt_tokens
        self._bytes -= row.num_bytes


async def by_prefix(rows: AsyncIterator[Prepared], lookahead: int) -> AsyncIterator[Prepared]:
    """Yield all rows; of each window of up to `lookahead` rows those with equal beginnings together.

    So that a shared prefix is computed once and still in the cache when it is needed again. lookahead 1 = as they
    come.
    """
    window: list[Prepared] = []
    load, size = _Load(), min(FIRST_WINDOW, lookahead)
    async for row in rows:
        window.append(row)
        load.add(row)
        if len(window) >= size or load.is_full:
            for one in _sorted(window):
                yield one
            window, load, size = [], _Load(), min(2 * size, lookahead)
    for one in _sorted(window):
        yield one


def _sorted(window: list[Prepared]) -> list[Prepared]:
    return sorted(window, key=lambda one: (one.requests[0].cache_salt, one.requests[0].prompt_token_ids))


@asynccontextmanager
async def prefetched(rows: AsyncIterator[Prepared], size: int) -> AsyncIterator[AsyncIterator[Prepared]]:
    """Read up to `size` rows ahead of who walks them, until the end of the block."""
    ready: deque[Prepared | None] = deque()
    changed = asyncio.Condition()
    load = _Load()

    def has_room() -> bool:
        return len(ready) < size and not load.is_full

    async def fill() -> None:
        async for row in rows:
            async with changed:
                await changed.wait_for(has_room)
                ready.append(row)
                load.add(row)
                changed.notify_all()
        async with changed:
            ready.append(None)
            changed.notify_all()

    async def drain() -> AsyncIterator[Prepared]:
        while True:
            async with changed:
                await changed.wait_for(lambda: ready)
                row = ready.popleft()
                if row is None:
                    return
                load.remove(row)
                changed.notify_all()
            yield row

    async with asyncio.TaskGroup() as group:
        reader = group.create_task(fill())
        yield drain()
        reader.cancel()
