"""The servers one after the other, each with the same streams of the same prompts."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from tests.bench.peers.served.client import OUTPUT_TOKENS, AskError, ask
from tests.bench.peers.served.servers import OURS, SERVERS, Running, Server, ServerError, Setting
from tests.bench.serve_start import Watch

STREAMS, REPLICAS = (1, 8, 32, 128), (1, 2)
LEAST = 8  # streams of one round: few at once are asked for several times
WARM_UP_TOKENS = 16
PROMPTS_OF_A_TURN = 1_000_000


@dataclass(frozen=True, slots=True)
class Case:
    """One row: so many streams at once, of a server with so many replicas."""

    server: str
    replicas: int
    dtype: str
    streams: int


@dataclass(frozen=True, slots=True)
class Round:
    """What was found in one round. firsts_ms: to each stream's first token. cpu_s: per 1,000 tokens, as is client's.

    texts: by number of the prompt.
    """

    firsts_ms: Sequence[float]
    tokens_per_s: float
    cpu_s: float
    client_cpu_s: float
    texts: Mapping[int, str] = field(repr=False)

    @property
    def median_ms(self) -> float:
        """Milliseconds to the first token."""
        return statistics.median(self.firsts_ms)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was found.

    given: a start, as it is `named` -> the server's version and what it was given. skipped: likewise, or a server's
    name -> why it was not measured, or not all.
    """

    rounds: dict[Case, list[Round]]
    given: dict[str, str]
    skipped: dict[str, str]


def compare(
    root: Path, *, servers: Sequence[Server] = tuple(SERVERS.values()), streams: Sequence[int] = STREAMS,
    replicas: Sequence[int] = REPLICAS, dtypes: Sequence[str] = ("float32",), rounds: int = 1, turns: int = 1,
    partial: bool = False, tell: Callable[[str], None] = lambda line: None,
) -> Comparison:  # fmt: skip
    """Start each server in turn and measure it. One that is not there or fails is skipped, and the reason kept.

    root: of the peers' environments. rounds: of each start. turns: starts of each server. partial: whether Ctrl-C
    ends the measuring alone, and what there is counts.
    """
    found = Comparison({}, {}, {})
    for server in servers:
        if why := server.absent(root):
            found.skipped[server.name] = why
            tell(f"{server.name} is skipped: {why}")
    there = [server for server in servers if server.name not in found.skipped]
    with tempfile.TemporaryDirectory(prefix="squadron-served-", ignore_cleanup_errors=True) as home:
        try:
            for turn, server, setting in starts(there, replicas, dtypes, turns, root, Path(home)):
                if (name := named(server, setting)) not in found.skipped:
                    tell(f"turn {turn + 1} of {turns}: {name}")
                    _measure(found, server, setting, streams, rounds, turn * PROMPTS_OF_A_TURN, tell)
        except KeyboardInterrupt:
            if not partial:
                raise
            tell("interrupted: what follows is what was measured until then")
    return found


def starts(
    servers: Sequence[Server], replicas: Sequence[int], dtypes: Sequence[str], turns: int, root: Path, home: Path
) -> Iterator[tuple[int, Server, Setting]]:
    """Yield what is started in which turn: another server first in each."""
    for turn in range(turns):
        first = turn % max(len(servers), 1)
        for dtype, count in itertools.product(dtypes, replicas):
            for server in (*servers[first:], *servers[:first]):
                yield turn, server, Setting(count, dtype, root, home)


def named(server: Server, setting: Setting) -> str:
    """Return how one start is known."""
    return f"{server.name}, {setting.replicas} {'replica' if setting.replicas == 1 else 'replicas'}, {setting.dtype}"


def agreeing(found: Comparison, case: Case) -> tuple[int, int]:
    """Return how many texts are those of our server, and of how many: with as many replicas, or else with another."""
    counts = (case.replicas, *(other.replicas for other in found.rounds))
    ours = next(filter(None, (_texts(found, replace(case, server=OURS, replicas=count)) for count in counts)), {})
    theirs = _texts(found, case)
    both = ours.keys() & theirs.keys()
    return sum(ours[number] == theirs[number] for number in both), len(both)


def _texts(found: Comparison, case: Case) -> dict[int, str]:
    return {number: text for each in found.rounds.get(case, ()) for number, text in each.texts.items()}


def _measure(
    found: Comparison, server: Server, setting: Setting, streams: Sequence[int], rounds: int, first: int,
    tell: Callable[[str], None],
) -> None:  # fmt: skip
    """Add what a server shows, or why it does not."""
    name = named(server, setting)

    def add(count: int, measured: Round) -> None:
        found.rounds.setdefault(Case(server.name, setting.replicas, setting.dtype, count), []).append(measured)

    try:
        with server.run(setting) as running:
            found.given[name] = f"{server.version}, {running.given}"
            asyncio.run(_ask(running, streams, rounds, first, add))
    except (ServerError, AskError, psutil.NoSuchProcess) as error:
        found.skipped[name] = str(error)
        tell(f"{name} is skipped: {error}")


async def _ask(
    running: Running, streams: Sequence[int], rounds: int, first: int, add: Callable[[int, Round], None]
) -> None:
    """Warm a server up and measure it. All servers get the same prompts, none of them twice."""
    numbers = itertools.count(first)
    watch = Watch(psutil.Process(running.pid))
    for count in streams:
        await ask(running.port, list(itertools.islice(numbers, count)), WARM_UP_TOKENS)
    for _ in range(rounds):
        for count in streams:
            add(count, await _round(running.port, count, numbers, watch))


async def _round(port: int, streams: int, numbers: Iterator[int], watch: Watch) -> Round:
    """Measure so many streams at once, several times where they are few."""
    times = max(1, LEAST // streams)
    watch.look()
    before = sum(watch.cpu().values())
    firsts, texts, seconds, client = [], {}, 0.0, 0.0
    for _ in range(times):
        asked_for = list(itertools.islice(numbers, streams))
        asked = await ask(port, asked_for)
        firsts += [1e3 * answer.first_s for answer in asked.answers]
        texts |= {number: answer.text for number, answer in zip(asked_for, asked.answers, strict=True)}
        seconds += asked.seconds
        client += asked.cpu_s
    watch.look()
    tokens = times * streams * OUTPUT_TOKENS
    used = sum(watch.cpu().values()) - before
    return Round(firsts, tokens / seconds, 1e3 * used / tokens, 1e3 * client / tokens, texts)
