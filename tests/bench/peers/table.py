"""What a comparison is told as: Markdown for docs/cpu.md, and figures for bench.json."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tests.bench.offline import EVEN, SINGLE_TOKENS, THREADS
from tests.bench.peers.comparison import FIRST, QUANTISED, Answer, Comparison, agreeing
from tests.bench.peers.engines import LIMITS, OURS, PARTLY
from tests.bench.random_model import VOCAB, make_load

SHARE, READINGS = "matrix_share", "readings"  # derived from the limits
HEADINGS = {
    "mixed_tokens_per_s": "mixed, tokens/s",
    SHARE: "of the matrix rate",
    "even_tokens_per_s": "even, tokens/s",
    "alone_ms": "alone, ms a token",
    READINGS: "readings of the weights",
    "first_ms": f"first of {FIRST}, ms",
}
SAME = "tokens as ours"
RATIOS = ("mixed_tokens_per_s", "even_tokens_per_s", "alone_ms", "first_ms")


def markdown(comparison: Comparison, origin: Mapping[str, Any]) -> str:
    """Return the tables. origin: `provenance()`, from before."""
    ratio = ["engine", "dtype", *(HEADINGS[name] for name in RATIOS)]
    limits = ["", "dtype", "reading the weights, ms", "matrix products, GFLOP/s"]
    parts = [
        _heading(comparison, origin),
        *rows("", ["engine", "dtype", *HEADINGS.values(), SAME], _figures(comparison)),
        *rows(f"How many times faster {OURS} is, in the same round:", ratio, _ratios(comparison)),
        *rows("What the machine can do:", limits, _limits(comparison)),
        "\n".join(f"- {line}" for line in _notes(comparison)),
    ]
    return "\n\n".join(filter(None, parts))


def figures(comparison: Comparison) -> dict[str, float]:
    """Return every figure by name: medians, and ratios of ours to each, over 1 where ours is faster."""
    found: dict[str, float] = {}
    for (engine, dtype), rounds in derived(comparison).items():
        for name in rounds[0]:
            stem = "" if engine == LIMITS.name else f"{slug(engine)}_"
            found[f"{stem}{name}_{dtype}"] = statistics.median(each[name] for each in rounds)
        if engine not in (OURS, LIMITS.name):
            for name, values in ratios(comparison, engine, dtype).items():
                found[f"vs_{slug(engine)}_{name}_{dtype}"] = statistics.median(values)
    return found


def derived(comparison: Comparison) -> dict[tuple[str, str], list[dict[str, float]]]:
    """Return the figures of each round, with those that tell how near an engine is to the limits of its round."""
    load = make_load(VOCAB, comparison.sequences)
    # Each answered token but the last is computed, too. Through the output's table go those that one is drawn from.
    tokens = sum(map(len, load.prompts)) + sum(load.outputs) - len(load.outputs)
    work = 2 * (comparison.layers * tokens + comparison.table * sum(load.outputs)) / sum(load.outputs) / 1e9
    found = {}
    for (engine, dtype), answers in comparison.answers.items():
        limits = comparison.answers.get((LIMITS.name, dtype), ())
        rounds = []
        for number, answer in enumerate(answers):
            more = {}
            if engine != LIMITS.name and number < len(limits):
                limit = limits[number].figures
                more[SHARE] = 100 * answer.figures["mixed_tokens_per_s"] * work / limit["matrix_gflops"]
                more[READINGS] = answer.figures["alone_ms"] / limit["reading_ms"]
            rounds.append({**answer.figures, **more})
        found[engine, dtype] = rounds
    return found


def ratios(comparison: Comparison, engine: str, dtype: str) -> dict[str, list[float]]:
    """Return how many times faster ours is, by figure and round."""
    ours, theirs = (comparison.answers.get((name, dtype), ()) for name in (OURS, engine))
    pairs = list(zip(ours, theirs, strict=False))  # one that failed has fewer rounds
    return {
        name: [_faster(name, mine.figures[name], other.figures[name]) for mine, other in pairs]
        for name in RATIOS
        if pairs
    }


def slug(engine: str) -> str:
    """Return an engine's name as a figure's name has it."""
    return re.sub(r"[^a-z0-9]+", "_", engine.lower())


def _faster(name: str, ours: float, theirs: float) -> float:
    return theirs / ours if name.endswith("_ms") else ours / theirs


def _heading(comparison: Comparison, origin: Mapping[str, Any]) -> str:
    sequences = comparison.sequences
    rounds = max(map(len, comparison.answers.values()), default=0)
    command = f"python -m tests.bench.peers --isa {comparison.isa} --rounds {rounds}"
    if quantised := [dtype for dtype in QUANTISED if any(dtype == asked for _, asked in comparison.answers)]:
        command += f" --dtypes {' '.join(quantised)}"
    if comparison.shape != "100m":
        command += f" --shape {comparison.shape}"
    if sequences != EVEN[0]:
        command += f" --sequences {sequences}"
    return (
        f"`{command}`, {told(origin)}. {THREADS} threads; medians of the rounds, with the least and the most. "
        f"The model: {(comparison.layers + comparison.table) / 1e6:.0f}M parameters, random. Mixed: "
        f"{sequences} prompts of 32 to 256 tokens that want 32 to 128; even: {sequences} of {EVEN[1]} that want "
        f"{EVEN[2]}; alone: {SINGLE_TOKENS} tokens of one prompt; no prefix is cached."
    )


def told(origin: Mapping[str, Any]) -> str:
    """Return `provenance()` in words."""
    machine, versions = origin["machine"], (f"{name} {version}" for name, version in origin["versions"].items())
    return (
        f"{origin['date'][:10]}, {machine['cpu']}, {machine['cores']} cores, load {machine['load_before']} before; "
        f"{', '.join(versions)}"
    )


def _figures(comparison: Comparison) -> list[list[str]]:
    result = []
    for (engine, dtype), rounds in _by_dtype(derived(comparison)):
        if engine != LIMITS.name:
            cells = [_spread([each[name] for each in rounds if name in each], name) for name in HEADINGS]
            result.append([engine, dtype, *cells, _same(comparison, engine, dtype)])
    return result


def _ratios(comparison: Comparison) -> list[list[str]]:
    result = []
    for (engine, dtype), _ in _by_dtype(comparison.answers):
        if engine not in (OURS, LIMITS.name) and (found := ratios(comparison, engine, dtype)):
            result.append([engine, dtype, *(_spread(found[name], "ratio") for name in RATIOS)])
    return result


def _limits(comparison: Comparison) -> list[list[str]]:
    result = []
    for (engine, dtype), answers in _by_dtype(comparison.answers):
        if engine == LIMITS.name:
            names = ("reading_ms", "matrix_gflops")
            cells = [_spread([answer.figures[name] for answer in answers], name) for name in names]
            result.append([f"torch {answers[0].version}", dtype, *cells])
    return result


def _notes(comparison: Comparison) -> list[str]:
    """Return what each engine is and how it was run, and why another is not there."""
    lines: dict[str, None] = {}
    for (engine, dtype), answers in _by_dtype(comparison.answers):
        if engine != LIMITS.name:
            of = f"{engine} {answers[0].version}"
            lines[f"{of}, {dtype}: {answers[0].note}" if answers[0].note else of] = None
            if comparison.isa != "native" and engine in PARTLY:
                lines[f"{engine}: {PARTLY[engine]}"] = None
    return [*lines, *(f"{name}: {' '.join(why.split())}" for name, why in comparison.skipped.items())]


def _by_dtype(found: Mapping[tuple[str, str], Any]) -> list[tuple[tuple[str, str], Any]]:
    """Return all of one dtype after the other, ours first: in which order they were asked is of no interest."""
    dtypes = list(dict.fromkeys(dtype for _, dtype in found))
    return sorted(found.items(), key=lambda item: (dtypes.index(item[0][1]), item[0][0] != OURS))


def _same(comparison: Comparison, engine: str, dtype: str) -> str:
    """Return how many tokens are those of ours in the same dtype, in the first round."""
    ours, theirs = (comparison.answers.get((name, dtype), ()) for name in (OURS, engine))
    if engine == OURS or not ours or not theirs:
        return ""
    return f"{agreeing(ours[0].tokens, theirs[0].tokens)} of {_count(ours[0])}"


def _count(answer: Answer) -> int:
    return sum(map(len, answer.tokens))


def _spread(values: Sequence[float], name: str) -> str:
    """Return the median of a figure, and the least and the most where there is more than one."""
    digits = {"ratio": 2, READINGS: 2, "alone_ms": 1, "reading_ms": 1}.get(name, 0)
    return spread(values, digits, " %" if name == SHARE else "")


def spread(values: Sequence[float], digits: int, unit: str = "") -> str:
    """Return the median, and the least and the most where there is more than one."""
    if not values:
        return ""
    middle = f"{statistics.median(values):,.{digits}f}"
    if len(values) == 1:
        return middle + unit
    return f"{middle} ({min(values):,.{digits}f} to {max(values):,.{digits}f}){unit}"


def rows(title: str, headings: Sequence[str], cells: Sequence[Sequence[str]], texts: int = 2) -> list[str]:
    """Return a title and its table, or nothing where it would have no rows. texts: columns that are no figures."""
    rule = [*["---"] * texts, *["---:"] * (len(headings) - texts)]
    return [title, "\n".join(f"| {' | '.join(row)} |" for row in (headings, rule, *cells))] if cells else []
