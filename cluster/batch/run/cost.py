"""The tokens that a batch may take: a limit that holds whatever the rows take, and a dry run that counts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.batch.errors import BatchError
from cluster.batch.ledger.ledger import Totals
from cluster.batch.row_requests import Prepared, Preparer
from cluster.batch.rows import InputSource, SourceRow, Task
from cluster.errors import ApiError, as_api_error
from cluster.openai.call import Call
from engine.errors import InvalidRequestError

SHOWN = 10


class Cost:
    """Admits rows while the most that they and all under way can take is within `limit`. Used on one event loop.

    limit: None = any cost. totals: of the rows that are done. context: most tokens of one sequence.
    """

    def __init__(self, limit: int | None, totals: Totals, context: int) -> None:
        self._limit = limit
        self._totals = totals
        self._context = context
        self._under_way: dict[int, int] = {}  # row -> the most that it takes
        self._change = asyncio.Event()

    @property
    def spent(self) -> int:
        """Tokens of the rows that are done."""
        return self._totals.prompt_tokens + self._totals.output_tokens

    async def admits(self, prepared: Prepared) -> bool:
        """Return whether the row may begin; where that depends on what others take, once they have ended."""
        while self.is_beyond(prepared):
            if not self._under_way:
                return False
            self._change.clear()
            await self._change.wait()
        if self._limit is not None:
            self._under_way[prepared.task.row] = self.most(prepared)
        return True

    def is_beyond(self, prepared: Prepared) -> bool:
        """Return whether the row, beside those under way, may take more than is left."""
        return (
            self._limit is not None and self.spent + sum(self._under_way.values()) + self.most(prepared) > self._limit
        )

    def refusal(self, prepared: Prepared) -> BatchError:
        """Return why the row must not begin, while none is under way."""
        return BatchError(
            f"{self.spent} tokens are spent, and the next row may take {self.most(prepared)} more, beyond "
            f"--max-cost-tokens {self._limit}; raise it and go on with --resume"
        )

    def ended(self, prepared: Prepared) -> None:
        """The row is done, and counted among the totals."""
        self._under_way.pop(prepared.task.row, None)
        self._change.set()

    def most(self, prepared: Prepared) -> int:
        """Return the most tokens that a row can take."""
        return prepared.num_prompt_tokens + most_output(prepared, self._context)


def most_output(prepared: Prepared, context: int) -> int:
    """Return the most tokens that the answers of a row can have. context: most tokens of one sequence."""
    call = prepared.call
    if not isinstance(call, Call):
        return 0
    wanted = call.params.max_tokens
    rooms = [context - len(request.prompt_token_ids) for request in prepared.requests]
    return call.params.n * sum([room if wanted is None else min(room, wanted) for room in rooms])


@dataclass(slots=True)
class DryRun:
    """What the rows would take. errors: rows that would fail, by code. problems: the first of them, in words.

    most_output_tokens: if every row went on to the end of what it asks for, or of the model's context.
    """

    rows: int = 0
    prompt_tokens: int = 0
    most_output_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def dry_run(source: InputSource, task_of: Callable[[SourceRow], Task], preparer: Preparer) -> DryRun:
    """Check every row as a run would, and return what they would take."""
    found = DryRun()
    for row in source.rows():
        found.rows += 1
        try:
            prepared = preparer.prepare(task_of(row))
        except (ApiError, InvalidRequestError) as error:
            typed = as_api_error(error)
            found.errors[typed.code] += 1
            if len(found.problems) < SHOWN:
                found.problems.append(f"{row.place}: {typed.message}")
            continue
        found.prompt_tokens += prepared.num_prompt_tokens
        found.most_output_tokens += most_output(prepared, preparer.model.longest_sequence)
    return found
