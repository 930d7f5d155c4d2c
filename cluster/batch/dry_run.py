"""A batch without an answer: every row checked as it would be, and its tokens counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.batch.cost import most_output
from cluster.batch.prepare import Preparer
from cluster.batch.rows import Source, SourceRow, Task
from cluster.errors import ApiError, as_api_error
from engine.errors import InvalidRequestError

SHOWN = 10


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


def dry_run(source: Source, task_of: Callable[[SourceRow], Task], preparer: Preparer) -> DryRun:
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
