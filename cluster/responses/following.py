"""What another router makes of an answer, as it comes by way of the copies."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from cluster.answer_log import AnswerLog, Kept
from cluster.errors import ApiError
from cluster.responses.copies import Copies
from cluster.responses.record import Record
from cluster.token_source import TokenChunk

PATIENCE = 5.0  # seconds that one look waits for news
MISSES, PAUSE = 8, 1.0  # looks in a row that find nothing, and the seconds between them, after which it is lost


class Following:
    """Walks an answer that others make, from what is known of it on.

    record: as it was fetched. on_current: called when all that is known of an answer was gone through, and it runs.
    """

    def __init__(self, record: Record, copies: Copies, kept: Kept, on_current: Callable[[], None]) -> None:
        self._record = record
        self._copies = copies
        self._kept = kept
        self._on_current = on_current
        kept.coming = self.coming
        kept.completed_at = None if record.end is None else record.end.at

    async def coming(self) -> AsyncIterator[tuple[int, TokenChunk]]:
        """Yield what comes behind the notes of the record; raises the `ApiError` that ended it."""
        record, misses = self._record, 0
        had: Counter[tuple[int, int]] = Counter()  # tokens of each choice
        scored: Counter[int] = Counter()  # tokens of each prompt
        for number, chunk in AnswerLog(record.notes).past:
            had[number, chunk.choice] += len(chunk.token_ids)
            scored[number] += len(chunk.prompt_logprobs)
        behind, told = had.copy(), scored.copy()  # those in the notes that are known of the log which is read now
        known, end = len(record.notes), record.end
        if end is None:
            self._on_current()
        while end is None:
            found = await self._copies.news(record, known, PATIENCE)
            if found is not None and found.version != record.version:  # another router counts its notes anew
                found = await self._all()
                if found is not None:
                    record = Record(record.head, epoch=found.epoch, owner=found.owner)
                    known, behind, told = 0, Counter(), Counter()
            if found is None:
                misses += 1
                if misses >= MISSES:
                    message = "whoever made this answer is lost, and nobody has a copy; send the request again"
                    raise ApiError("router_lost", message)
                await asyncio.sleep(PAUSE)
                continue
            misses, end = 0, found.end
            for number, chunk in AnswerLog(found.notes).past:
                key = number, chunk.choice
                new = _beyond(chunk, had[key] - behind[key], scored[number] - told[number])
                behind[key] += len(chunk.token_ids)
                told[number] += len(chunk.prompt_logprobs)
                had[key], scored[number] = max(had[key], behind[key]), max(scored[number], told[number])
                if new is not None:
                    yield number, new
            known += len(found.notes)
        self._kept.completed_at = end.at
        if (error := end.error()) is not None:
            raise error

    async def _all(self) -> Record | None:
        """Return all that is kept of it now."""
        try:
            return await self._copies.fetch(self._record.head.name, self._record.head.tenant)
        except ApiError:  # nobody can be asked for now
            return None


def _beyond(chunk: TokenChunk, count: int, scored: int) -> TokenChunk | None:
    """Return a chunk without its first `count` tokens and `scored` ones of its prompt, None where nothing is left."""
    count, scored = max(count, 0), max(scored, 0)
    rest = replace(
        chunk,
        token_ids=chunk.token_ids[count:],
        logprobs=chunk.logprobs[count:],
        prompt_logprobs=chunk.prompt_logprobs[scored:],
    )
    return rest if rest.token_ids or rest.prompt_logprobs or rest.finish_reason is not None else None
