"""The engines in turns, each in a fresh process of its own environment, on the same weights and token ids."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import safe_open

from engine.loader.checkpoint import open_model
from engine.loader.quantised_copy import write_quantised
from tests.bench.offline import EVEN, SINGLE_TOKENS, THREADS, even_load, has_bf16_units
from tests.bench.peers.child import Job, Prompts
from tests.bench.peers.engines import ENGINES, HERE, LIMITS, Engine, absent, for_isa, variables
from tests.bench.peers.environments import last_lines, python_of
from tests.bench.random_model import SIZES, VOCAB, Load, make_load, save_random_model

TIMEOUT = 1800.0  # seconds for one process
MAX_MODEL_LEN = 1024
FIRST = 512  # tokens of the prompts whose first token is timed
DTYPES = ("float32", "bfloat16")
QUANTISED = ("int8", "int4")  # weights, with activations in the fastest dtype


@dataclass(frozen=True, slots=True)
class Answer:
    """What one process found. figures: by name. tokens: of the prompts that were checked. note: how it was run."""

    figures: Mapping[str, float]
    tokens: Sequence[Sequence[int]] = ()
    version: str = ""
    note: str = ""


class ProcessError(Exception):
    """A process failed; the message ends with its last lines."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was found.

    answers: by engine and dtype, one of each round. skipped: engine -> why it is not compared, or not in every round.
    sequences: of each load. layers, table: parameters; the table is that of the embeddings and of the output. shape:
    of the model.
    """

    isa: str
    sequences: int
    answers: Mapping[tuple[str, str], Sequence[Answer]]
    skipped: Mapping[str, str]
    layers: int
    table: int
    shape: str = "100m"


def compare(
    root: Path, *, isa: str = "native", rounds: int = 1, engines: Sequence[Engine] = tuple(ENGINES.values()),
    dtypes: Sequence[str] | None = None, sequences: int = EVEN[0], shape: str = "100m", partial: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Comparison:  # fmt: skip
    """Measure the engines in turns. An engine that is not there or fails is skipped, and the reason kept.

    root: of the peers' environments. dtypes: without, float32, and bfloat16 where the CPU computes it fast.
    sequences: of each load, 64 at most. shape: of the model, of `SIZES`. partial: whether Ctrl-C ends the measuring
    alone, and what there is counts.
    """
    skipped = {engine.name: why for engine in engines if (why := absent(for_isa(engine, isa), isa, root))}
    for name, why in skipped.items():
        tell(f"{name} is skipped: {why}")
    there = [for_isa(engine, isa) for engine in engines if engine.name not in skipped]
    answers: dict[tuple[str, str], list[Answer]] = {}
    with tempfile.TemporaryDirectory(prefix="squadron-peers-") as name:
        folder = Path(name)
        save_random_model(folder / "model", sizes=SIZES[shape])
        found = Comparison(isa, sequences, answers, skipped, *parameters(folder / "model"), shape)
        try:
            for number, dtype, engine in turns(there, dtypes or usual_dtypes(isa), rounds):
                if engine.name not in skipped and (dtype not in QUANTISED or engine.quantises):
                    tell(f"round {number + 1} of {rounds}, {dtype}: {engine.name}")
                    work = job(folder / "model", dtype, isa, number, sequences)
                    _add(engine, work, folder, root, answers, skipped, tell)
        except KeyboardInterrupt:
            if not partial:
                raise
            tell("interrupted: what follows is what was measured until then")
    return found


def turns(engines: Sequence[Engine], dtypes: Sequence[str], rounds: int) -> Iterator[tuple[int, str, Engine]]:
    """Yield round, dtype and engine: what the machine can do first, and another engine first in each round."""
    for number in range(rounds):
        first = number % max(len(engines), 1)
        for dtype in dtypes:
            for engine in (LIMITS, *engines[first:], *engines[:first]):
                yield number, dtype, engine


def parameters(model: Path) -> tuple[int, int]:
    """Return how many parameters the layers of a checkpoint have, and how many the table of its tokens."""
    with safe_open(model / "model.safetensors", "np") as file:
        names = file.keys()
        counts = {name: math.prod(file.get_slice(name).get_shape()) for name in names}
    table = counts.pop("model.embed_tokens.weight")
    return sum(counts.values()), table


def usual_dtypes(isa: str) -> tuple[str, ...]:
    """Return float32, and bfloat16 where the CPU has units for it and is not taken for less."""
    return DTYPES if isa == "native" and has_bf16_units() else DTYPES[:1]


def job(model: Path, dtype: str, isa: str, number: int, sequences: int) -> Job:
    """Return what is asked in a round; `converted` is left to `_ask`. All prompts are of random token ids."""
    pick = random.Random(number + 1)

    def prompts(count: int, length: int, tokens: int) -> Prompts:
        return Prompts([[pick.randrange(10, VOCAB) for _ in range(length)] for _ in range(count)], [tokens] * count)

    def of(load: Load) -> Prompts:
        return Prompts(load.prompts[:sequences], load.outputs[:sequences])

    activations = usual_dtypes(isa)[-1] if dtype in QUANTISED else dtype
    return Job(
        model=str(model), converted="", dtype=dtype, activations=activations, isa=isa, threads=THREADS,
        max_model_len=MAX_MODEL_LEN, warm_up=prompts(8, EVEN[1], 4), mixed=of(make_load(VOCAB, sequences)),
        even=of(even_load(VOCAB)), alone=prompts(3, EVEN[1], SINGLE_TOKENS), first=prompts(5, FIRST, 1),
        checked=prompts(4, 50, 16),
    )  # fmt: skip


def agreeing(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> int:
    """Return how many tokens are the same, in each answer up to the first other one."""
    count = 0
    for mine, other in zip(ours, theirs, strict=True):
        same = [one == another for one, another in zip(mine, other, strict=True)]
        count += same.index(False) if False in same else len(same)
    return count


def _add(
    engine: Engine, work: Job, folder: Path, root: Path, answers: dict[tuple[str, str], list[Answer]],
    skipped: dict[str, str], tell: Callable[[str], None],
) -> None:  # fmt: skip
    """Add what an engine answers, or why it does not."""
    try:
        found = _ask(engine, folder, work, root)
    except ProcessError as error:
        skipped[engine.name] = f"failed in {work.dtype}: {error}"
        tell(f"{engine.name} {skipped[engine.name]}")
    else:
        answers.setdefault((engine.name, work.dtype), []).append(found)


def _ask(engine: Engine, folder: Path, work: Job, root: Path) -> Answer:
    """Run an engine on a job. Raises `ProcessError`."""
    python = str(python_of(engine.environment, root)) if engine.environment else sys.executable
    said = variables(engine, work.isa, root)
    if engine.converter:
        each = engine.converts_each or work.dtype in QUANTISED
        converted = folder / (f"{engine.environment}-{work.dtype}" if each else engine.environment)
        if not converted.exists():
            _run([python, engine.converter, work.model, str(converted), work.dtype], said)
        work = replace(work, converted=str(converted))
    elif engine.reads_copies and work.dtype in QUANTISED:
        copy = folder / f"copy-{work.dtype}"
        if not copy.exists():
            quantise(work.model, copy, work.dtype)
        work = replace(work, converted=str(copy))
    asked, answered = folder / "job.json", folder / "answer.json"
    answered.unlink(missing_ok=True)
    work.write(asked)
    _run([python, engine.script, str(asked), str(answered)], said)
    if not answered.is_file():
        raise ProcessError(f"{engine.script} ended without an answer")
    return Answer(**json.loads(answered.read_text()))


def quantise(model: str, copy: Path, form: str) -> None:
    """Write a checkpoint again as `squadron quantize` does."""
    write_quantised(open_model(model), copy, form)


def _run(command: list[str], environment: Mapping[str, str]) -> None:
    """Run a script of this folder; `ProcessError` where it fails or takes too long. Its children end with it."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(
            [command[0], str(HERE / command[1]), *command[2:]], cwd=tempfile.gettempdir(), env=dict(environment),
            stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(TIMEOUT)
            how = f"{command[1]} ended with {code}"
        except subprocess.TimeoutExpired:
            code, how = 1, f"{command[1]} had not ended after {time.monotonic() - began:.0f} s"
        finally:
            _end(process)
        if code:
            said.seek(0)
            raise ProcessError(f"{how}:\n{last_lines(said.read())}")


def _end(process: subprocess.Popen) -> None:
    """End a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()
