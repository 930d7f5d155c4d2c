"""Memory of a batch driver against the size of its input: `python -m tests.bench.batch_memory` (mock engine).

Everything but the replicas is real: input files, check, ledger, order, dispatch, answers, output. Each size runs in a
process of its own, whose peak is told by the system.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cluster.batch.io.check import check_input
from cluster.batch.io.manifest import OutputSpec, Style
from cluster.batch.io.output_files import Finished, write_output
from cluster.batch.io.source import open_source
from cluster.batch.ledger.ledger import Ledger
from cluster.batch.ledger.records import Job
from cluster.batch.row_requests import Preparer
from cluster.batch.row_tasks import kind_of, task_maker
from cluster.batch.run.backlog import Backlog, full_bounds
from cluster.batch.run.loop import BatchLoop, RunLimits
from cluster.batch.run.run_row import Answers, RowSource, Ticker
from cluster.config import resolve_config
from cluster.router.dispatcher import Dispatcher
from cluster.router.models import served_model
from cluster.telemetry.metrics import Metrics, ReplicaSetStats
from cluster.token_source import NO_CONTEXT, CallContext, TokenChunk
from engine.request import Request
from tests.bench.machine import provenance

SIZES = (10_000, 100_000, 1_000_000)
TOKENS = 4
SEQUENCES = 64


class MockEngine:
    """Answers each request with a few tokens, a turn of the event loop later."""

    async def generate(self, request: Request, context: CallContext = NO_CONTEXT) -> AsyncIterator[TokenChunk]:
        await asyncio.sleep(0)
        first = len(request.prompt_token_ids)
        yield TokenChunk(0, tuple(100 + (first + i) % 100 for i in range(TOKENS)), finish_reason="length")

    fingerprint = "mock"

    def log_of(self, request_id: str) -> None:
        """All is told at once: there is nothing to look at."""

    def finish_choice(self, request_id: str, choice: int) -> None:
        """All choices end by themselves."""


def write_input(path: Path, rows: int) -> None:
    """Write requests of some sixty tokens."""
    with path.open("w") as file:
        for number in range(rows):
            body = {"model": "demo", "prompt": f"def f{number}(x):\n" + "    return x\n" * 12, "max_tokens": TOKENS}
            request = {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(request) + "\n")


async def run_rows(folder: Path) -> None:
    """Run the batch whose input lies in `folder`."""
    config = resolve_config({"model": "demo"})
    model = served_model(config)
    source = open_source([str(folder / "rows.jsonl")], folder)
    tasks = task_maker(kind_of(source), model.model_id)
    checked = check_input(source, tasks, folder)
    job = Job(
        rows=checked.rows,
        input_digest=checked.digest,
        model="demo",
        fingerprint="",
        settings="{}",
        created=1,
        version="",
    )
    with closing(Ledger.open(folder / "ledger", job, resume=False)) as ledger:
        dispatcher = Dispatcher()
        backlog = Backlog(full_bounds(dispatcher, SEQUENCES, 8192)).of("")
        ticker = Ticker([ledger.flush, backlog.adjust])
        answers = Answers(model, RowSource(MockEngine(), ledger, ticker), Metrics().of("demo", ReplicaSetStats))
        preparer = Preparer(model, "job", 0, 1)
        await BatchLoop(source, tasks.task, preparer, answers, ledger, backlog, ticker, RunLimits()).run()
        await dispatcher.close()
        spec = OutputSpec(str(folder / "answers.jsonl"), Style.OPENAI)
        write_output(spec, Finished(job, source, tasks, ledger.results()), folder, ledger.check)


def one_size(rows: int) -> dict[str, float]:
    """Run one size in this process; return its peak in MB, and rows a second."""
    with tempfile.TemporaryDirectory() as name:
        write_input(Path(name) / "rows.jsonl", rows)
        began = time.perf_counter()
        asyncio.run(run_rows(Path(name)))
        seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"rows": rows, "peak_mb": peak, "rows_per_s": rows / seconds}


def measure(sizes: Sequence[int]) -> list[dict[str, float]]:
    """Run each size in a process of its own."""
    found = []
    for rows in sizes:
        command = [sys.executable, "-m", "tests.bench.batch_memory", "--one", str(rows)]
        found.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    return found


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--one", type=int, help="run one size in this process, and print JSON")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(one_size(options.one)))
        return
    found = measure(options.sizes)
    table = Table("rows", "peak MB", "rows/s", title="batch driver, mock engine")
    for one in found:
        table.add_row(f"{one['rows']:,.0f}", f"{one['peak_mb']:.1f}", f"{one['rows_per_s']:,.0f}")
    Console().print(table)
    if options.output:
        options.output.write_text(json.dumps({"sizes": found, **provenance()}, indent=2))


if __name__ == "__main__":
    main()
