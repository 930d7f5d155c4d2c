"""What a batch on the server costs the clients beside it: `python -m tests.bench.batch_filler`.

Streams run side by side, some rounds of them: first alone, then beside a batch that may take a quarter of the
sequences while they run, then beside one that may take all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import openai
import ray
from ray import serve
from rich.console import Console
from rich.table import Table

from tests.bench.machine import provenance
from tests.chaos.batch import write_rows
from tests.chaos.streams import WHOLE, client_of, greedy_or_seeded, read_all
from tests.e2e.harness import App, deploy, eventually, start_ray, start_serve

START_SECONDS = 30.0


def rows(count: int) -> list[dict[str, Any]]:
    """Rows of a hundred tokens each."""
    body = {"model": "demo", "max_tokens": 100, "ignore_eos": True, "temperature": 0.8}
    return [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": {**body, "prompt": f"def f{i}("}}
        for i in range(count)
    ]


def figures(app: App, streams: int, tokens: int, rounds: int) -> dict[str, float]:
    """Seconds per token of each stream after its first, and to the first."""

    async def run() -> dict[str, float]:
        asked = [greedy_or_seeded(i, tokens) for i in range(streams)]
        per_token: list[float] = []
        async with client_of(app.url) as client:
            for _ in range(rounds):
                for stream in await read_all(client, asked):
                    if stream.kind != WHOLE:
                        raise RuntimeError(f"a stream failed: {stream.error}")
                    per_token.append((stream.times[-1] - stream.times[0]) / (len(stream.times) - 1))
        return {"tpot_ms_median": 1e3 * statistics.median(per_token), "tpot_ms_worst": 1e3 * max(per_token)}

    return asyncio.run(run())


def beside_a_batch(app: App, folder: Path, *how: int) -> tuple[dict[str, float], int]:
    """Like `figures`, with a batch; and the rows that it did meanwhile."""
    client = openai.OpenAI(base_url=f"{app.url}/v1", api_key="none")
    with write_rows(folder / "rows.jsonl", rows(5000)).open("rb") as file:
        uploaded = client.files.create(file=file, purpose="batch")
    batch = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="24h")
    eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0, "it runs", START_SECONDS)
    before = client.batches.retrieve(batch.id).request_counts.completed
    found = figures(app, *how)
    done = client.batches.retrieve(batch.id).request_counts.completed - before
    client.batches.cancel(batch.id)
    eventually(lambda: client.batches.retrieve(batch.id).status == "cancelled", "it ends", START_SECONDS)
    return found, done


def main() -> None:
    """Run all and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    how = (options.streams, options.tokens, options.rounds)
    found: dict[str, dict[str, float]] = {}
    start_ray()
    try:
        port = start_serve()
        for share in (0.25, 1.0):
            with tempfile.TemporaryDirectory() as folder:
                app = deploy(port, model="demo", replicas=1, batch_dir=folder, batch_share=share)
                found.setdefault("alone", figures(app, *how))
                beside, done = beside_a_batch(app, Path(folder), *how)
                found[f"beside a batch, --batch-share {share:g}"] = {**beside, "rows": done}
                serve.delete("squadron")
    finally:
        serve.shutdown()
        ray.shutdown()
    table = Table("clients' streams", "TPOT ms, median", "worst", "rows meanwhile")
    for name, one in found.items():
        cells = (one["tpot_ms_median"], one["tpot_ms_worst"])
        table.add_row(name, *(f"{cell:.1f}" for cell in cells), f"{one.get('rows', 0):.0f}")
    Console().print(table)
    if options.output:
        options.output.write_text(json.dumps({"figures": found, **provenance()}, indent=2))


if __name__ == "__main__":
    main()
