"""What a replica keeps for one router: its link, the runs it asked for, and the rows of the report being filled."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.admission.figures import QueueFigures
from cluster.wire.link import LinkClosedError, RouterLink
from cluster.wire.message_parts import BlockUpdate, Costs, FinishRow, Load, LogprobRow, PooledRow, PromptRow
from cluster.wire.messages import Down, Heartbeat, Report
from engine.report import TokenLogprob
from engine.request import Sequence


@dataclass(eq=False, slots=True)
class Run:
    """One attempt to run a request. `lanes`: choice -> its lane, those that have not ended."""

    engine_id: str
    stream: int
    session: RouterSession
    lanes: dict[int, Lane] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Lane:
    """One choice of a run: where its tokens go. `count`: output tokens reported, those of the resume log included."""

    run: Run
    session: RouterSession
    key: int
    choice: int
    count: int
    sequence: Sequence | None = None


class RouterSession:
    """One router's share of a replica. The column lists are filled by the replica and emptied by `flush`.

    num_block_updates: changes of the prefix cache that were told. highest_stream: of the submits that came, or can
    come no more.
    """

    def __init__(self, link: RouterLink, number: int, incarnation: int, now: float) -> None:
        self.link = link
        self.number = number
        self.runs: dict[int, Run] = {}
        self.highest_stream = -1
        self.last_heard = now
        self.last_beat = now
        self.costs_due = now
        self.queue = QueueFigures()  # what waits in the router
        self.streams: list[int] = []
        self.indices: list[int] = []
        self.tokens: list[int] = []
        self.finishes: list[FinishRow] = []
        self.logprobs: list[LogprobRow] = []
        self.cached: list[tuple[int, int]] = []
        self.prompts: list[PromptRow] = []
        self.pooled: list[PooledRow] = []
        self._incarnation = incarnation
        self._num_reports = 0
        self.num_block_updates = 0

    @property
    def has_rows(self) -> bool:
        """Whether the present step brought anything for this router."""
        return bool(self.streams or self.finishes or self.prompts)

    def add_logprobs(self, entry: TokenLogprob) -> None:
        """Give the row that was added last its log-probabilities."""
        ids = [token_id for token_id, _ in entry.top]
        values = [value for _, value in entry.top]
        self.logprobs.append(LogprobRow(len(self.streams) - 1, entry.logprob, ids, values))

    def flush(
        self,
        step: int,
        load: Load,
        others: int,
        blocks: tuple[list[int], list[int], bool] | None = None,
        costs: Costs | None = None,
    ) -> None:
        """Send what was gathered as one report.

        others: requests of other routers here. blocks: (stored, removed, cleared) of the prefix cache.
        """
        update = None
        if blocks is not None:
            update = BlockUpdate(self.num_block_updates, *blocks)
            self.num_block_updates += 1
        report = Report(
            self._num_reports,
            self._incarnation,
            step,
            self.streams,
            self.indices,
            self.tokens,
            load,
            self.finishes,
            self.logprobs,
            self.cached,
            update,
            self.prompts,
            self.pooled,
            others,
            costs,
        )
        self._num_reports += 1
        self.streams, self.indices, self.tokens = [], [], []
        self.finishes, self.logprobs, self.cached = [], [], []
        self.prompts, self.pooled = [], []
        self.send(report)

    def beat(self, load: Load, now: float, others: int, costs: Costs | None = None) -> None:
        """Say that all is well, and what runs here for this router. Arguments as of `flush`."""
        self.last_beat = now
        running = [lane.key for run in self.runs.values() for lane in run.lanes.values()]
        updates, submitted = self.num_block_updates, self.highest_stream + 1
        self.send(Heartbeat(self._incarnation, load, updates, others, costs, submitted, running))

    def send(self, message: Down) -> None:
        """Send `message`. On a link that is over nothing is sent: whoever reads the link hears of its end."""
        if not self.link.closed:
            try:
                self.link.send(message)
            except LinkClosedError:
                return
