"""From a task to engine requests, by the same validator as every ingress."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from cluster.batch.rows import CHAT, COMPLETIONS, EMBEDDINGS, Task
from cluster.errors import ApiError
from cluster.openai.call import Call
from cluster.openai.embeddings import EmbeddingCall, embedding_call
from cluster.openai.prompts import Parse, build_requests
from cluster.openai.served_model import ServedModel
from cluster.openai.validation import parse_chat, parse_completion
from engine.errors import InvalidRequestError
from engine.request import Request

logger = logging.getLogger(__name__)
_PARSE: Mapping[str, tuple[Parse, str]] = {CHAT: (parse_chat, "chatcmpl-"), COMPLETIONS: (parse_completion, "cmpl-")}


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
    def tells_its_prompt(self) -> bool:
        """Whether the answer tells more of its tokens than their text, so that it cannot go on from tokens alone."""
        call = self.call
        return isinstance(call, EmbeddingCall) or (call.params.prompt_logprobs is not None or call.echo)


@dataclass(frozen=True, slots=True)
class Preparer:
    """Makes tasks ready: everything that decides an answer follows from what is given here and the row's number.

    job: in few characters; equal for equal jobs; answers are named by it. seed: rows that bring none draw by it and
    their number. created: seconds since 1970. salt_of: makes a row's salt of the prefix cache that of its tenant.
    priority: in place of the rows' own. None = as the rows say. lot: what sets the draws apart from those of another
    batch with the same seed; "" = nothing. tenant: who is charged. told: fields that had no use and were logged.
    """

    model: ServedModel
    job: str
    seed: int
    created: int
    salt_of: Callable[[bytes], bytes] | None = None
    priority: int | None = None
    lot: str = ""
    tenant: str = ""
    told: set[str] = field(default_factory=set)

    def prepare(self, task: Task) -> Prepared:
        """Check and tokenize; raises `ApiError` or `InvalidRequestError` in the words of the row's own fields."""
        if task.problem:
            raise ApiError("invalid_request", task.problem, param=task.param)
        if task.url == EMBEDDINGS:
            embedding = embedding_call(task.body, self.model)
            self._tell_ignored(task, embedding.ignored)
            own = self._own(embedding.requests)
            return _prepared(task, replace(embedding, requests=own), own)
        parse, prefix = _PARSE[task.url]
        parsed = parse(task.body, self.model)
        self._tell_ignored(task, parsed.ignored)
        seed = parsed.seed if parsed.params.seed is not None else _number(self.lot, self.seed, task.row, b"seed") >> 1
        name = f"{prefix}{_number(self.job, self.seed, task.row, b'id'):016x}"
        call = replace(parsed, request_id=name, seed=seed, created=self.created, tells_cache=False)
        try:
            requests = build_requests(call, self.model)
        except (ApiError, InvalidRequestError) as error:
            raise call.clients_error(error) from error
        return _prepared(task, call, self._own(requests))

    def _tell_ignored(self, task: Task, names: Sequence[str]) -> None:
        """An answer's line has no place for them, so the log names each once."""
        for name in names:
            if name not in self.told:
                self.told.add(name)
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
