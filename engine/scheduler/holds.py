"""What keeps a step from being planned while the one before it runs. All reasons are here.

A step is planned ahead from what can be counted: every row of the step before computes its tokens, and those that
draw draw one. A step is held, and planned when the results are known, where more than that is wanted:

- *forks*: siblings of n > 1 join when the prompt that they share has been computed;
- *prompts*: what is told of prompts decides whether a request is done, and what is computed again;
- *blocks*: somebody would have to be preempted, though the step that runs may end others and free theirs;
- *memory*: the device has no memory for a second step beside the first (noted by the core).

What a row draws by the token that is drawn now holds nobody: penalties and bad words of several tokens find it on the
device (`SamplingInputs.carried`, `endings`), a grammar's mask is filled once it is known, while the model runs.
"""

from __future__ import annotations

from enum import StrEnum

from engine.report import Ints
from engine.scheduler.roster import Roster
from engine.scheduler.rows import Rows
from engine.scheduler.schedule import Schedule


class Hold(StrEnum):
    """Why a step waits for the results of the one before."""

    FORKS = "forks"
    PROMPTS = "prompts"
    BLOCKS = "blocks"
    MEMORY = "memory"


def held_by(before: Schedule) -> Hold | None:
    """Return why no step can be planned while `before` runs; None where one can, if there are blocks for it."""
    if before.forks:
        return Hold.FORKS
    if before.scores or before.pooled:
        return Hold.PROMPTS
    return None


def lacks_blocks(roster: Roster, rows: Rows, query_lens: Ints) -> bool:
    """Whether somebody would have to be preempted so that the running compute so many tokens. [running]."""
    size, available = rows.blocks.block_size, rows.blocks.num_available
    sharers = len(roster.tail_sharers)
    if len(query_lens) + int(query_lens.sum()) // size + sharers <= available:
        return False  # each takes a block more than its tokens fill, at most
    seq_lens = rows.tables.num_computed[roster.slots] + query_lens
    short = seq_lens - rows.tables.capacity[roster.slots]
    return int((-(-short.clip(min=0) // size)).sum()) + sharers > available
