"""What a comparison of servers is told as: Markdown for docs/benchmarks.md, and figures for bench.json."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tests.bench.peers.served.client import OUTPUT_TOKENS, PROMPT_TOKENS
from tests.bench.peers.served.comparison import Case, Comparison, Round, agreeing
from tests.bench.peers.served.servers import OURS, SERVERS
from tests.bench.peers.table import rows, slug, spread, told

# What is told of a round -> how it is taken of one, and its digits.
MEDIAN, WORST, RATE, CPU, CLIENT = FIGURES = (
    "first token, ms",
    "the worst",
    "tokens/s",
    "CPU s per 1,000 tokens",
    "the client's",
)
TAKEN: Mapping[str, tuple[Callable[[Round], float], int]] = {
    MEDIAN: (lambda each: each.median_ms, 0),
    WORST: (lambda each: max(each.firsts_ms), 0),
    RATE: (lambda each: each.tokens_per_s, 0),
    CPU: (lambda each: each.cpu_s, 2),
    CLIENT: (lambda each: each.client_cpu_s, 2),
}
NAMES = {MEDIAN: "ttft_ms", WORST: "worst_ttft_ms", RATE: "tokens_per_s", CPU: "cpu_s_per_1000"}
RATIOS = (MEDIAN, RATE, CPU)
SAME = "texts as ours"
CHECKED = "float32"  # elsewhere the last bits differ, and tokens with them


def markdown(found: Comparison, origin: Mapping[str, Any], command: str) -> str:
    """Return the tables. origin: `provenance()`, from before. command: that was run."""
    kind = ["server", "replicas", "dtype", "streams"]
    parts = [
        f"`{command}`, {told(origin)}. The demo model; streams of `/v1/completions`, each of a prompt of "
        f"{PROMPT_TOKENS} tokens that no other begins with, and of {OUTPUT_TOKENS} tokens; one client for all, on "
        "the same cores. Medians of the rounds, with the least and the most.",
        *rows("", [*kind, *FIGURES, SAME], [_row(found, case) for case in ordered(found)], len(kind)),
        *rows(f"How many times better {OURS} is:", [*kind, *RATIOS], _ratios(found), len(kind)),
        "\n".join(f"- {line}" for line in _notes(found)),
    ]
    return "\n\n".join(filter(None, parts))


def figures(found: Comparison) -> dict[str, float]:
    """Return every figure by name: medians, and ratios of ours to each, over 1 where ours is better."""
    result: dict[str, float] = {}
    for case in ordered(found):
        tail = f"{case.streams}_streams_{case.replicas}_replicas_{case.dtype}"
        for figure, name in NAMES.items():
            result[f"{slug(case.server)}_{name}_{tail}"] = median(found.rounds[case], figure)
        for figure, value in ratios_of(found, case).items():
            result[f"vs_{slug(case.server)}_{NAMES[figure]}_{tail}"] = value
    return result


def median(rounds: Sequence[Round], figure: str) -> float:
    """Return a figure over all rounds."""
    return statistics.median(map(TAKEN[figure][0], rounds))


def ratios_of(found: Comparison, case: Case) -> dict[str, float]:
    """Return how many times better ours is, by figure, where both were measured."""
    ours, theirs = found.rounds.get(replace(case, server=OURS)), found.rounds[case]
    if case.server == OURS or not ours:
        return {}
    result = {figure: median(theirs, figure) / median(ours, figure) for figure in (MEDIAN, CPU)}
    return result | {RATE: median(ours, RATE) / median(theirs, RATE)}


def ordered(found: Comparison) -> list[Case]:
    """Return all cases: those that are compared with each other stand together."""
    names = [server.name for server in SERVERS.values()]
    place = {name: number for number, name in enumerate([*names, *(case.server for case in found.rounds)][::-1])}
    return sorted(found.rounds, key=lambda case: (case.dtype, case.replicas, case.streams, -place[case.server]))


def _row(found: Comparison, case: Case) -> list[str]:
    rounds = found.rounds[case]
    cells = [spread([take(each) for each in rounds], digits) for take, digits in TAKEN.values()]
    same, total = agreeing(found, case)
    checked = case.server != OURS and case.dtype == CHECKED and total
    return [*_kind(case), *cells, f"{same} of {total}" if checked else ""]


def _ratios(found: Comparison) -> list[list[str]]:
    result = []
    for case in ordered(found):
        if ratios := ratios_of(found, case):
            result.append([*_kind(case), *(f"{ratios[figure]:.2f}" for figure in RATIOS)])
    return result


def _kind(case: Case) -> list[str]:
    return [case.server, str(case.replicas), case.dtype, str(case.streams)]


def _notes(found: Comparison) -> list[str]:
    """Return how each was started, and why another is not there."""
    lines = (f"{name}: {given}" for name, given in found.given.items())
    return [*lines, *(f"{name} is left out: {' '.join(why.split())}" for name, why in found.skipped.items())]
