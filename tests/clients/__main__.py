"""Try clients against a server, and print a table of what works.

    python -m tests.clients [--only NAME ...] [--url http://127.0.0.1:8000/v1] [--model demo] [--page]

Each client is installed by pip or npm into a folder of its own, at the version that is pinned in `catalogue.py`, and
its script in `scripts/` is run. Without `--url` a server is started here (`server.py`), which needs no Ray. A server
of your own must have a model whose chat template reads tools; `python -m tests.clients.model` writes one. `--page`
writes what came of it into docs/guides/clients.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deploy.demo import demo_model_path
from tests.clients.catalogue import CLIENTS, Client
from tests.clients.matrix import PAGE, page_with
from tests.clients.running import Outcome, Result, Server, try_client

CACHE = Path(tempfile.gettempdir()) / "squadron-clients"
COLOURS = {Outcome.PASSED: "green", Outcome.FAILED: "red", Outcome.NOT_INSTALLABLE: "yellow"}


@contextmanager
def started_server() -> Iterator[str]:
    """Give the address of a server in a process of its own, which ends with the context."""
    command = [sys.executable, "-m", "tests.clients.server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().strip() if process.stdout else ""
            if not url:
                raise SystemExit(f"the server did not start (exit code {process.wait()}): see what it printed above")
            yield url
        finally:
            process.terminate()


def table(results: Sequence[Result]) -> Table:
    """Return the table: a row for each client."""
    found = Table("client", "packages", "outcome", "passed", "why not")
    for result in results:
        outcome = f"[{COLOURS[result.outcome]}]{result.outcome}[/]"
        packages = "\n".join(result.client.packages).replace("[", r"\[")
        found.add_row(
            result.client.name, packages, outcome, " ".join(result.checks), result.reason.replace("[", r"\[")
        )
    return found


def chosen(names: Sequence[str] | None) -> list[Client]:
    """Return the clients of these names, all where there are none."""
    return [client for client in CLIENTS if not names or client.name in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Try what the command line names; 1 where one failed, 0 where the others could not be installed."""
    parser = argparse.ArgumentParser(
        "python -m tests.clients", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [client.name for client in CLIENTS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--url", help="of a server that is up, with /v1; without it one is started")
    parser.add_argument("--model", default="demo", help="the model that is asked for (default: demo)")
    parser.add_argument("--key", default="none", help="the API key, where the server wants one")
    parser.add_argument("--tokenizer", help="the folder or name of the model's tokenizer (default: the model's name)")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"where clients are kept (default: {CACHE})")
    parser.add_argument("--page", action="store_true", help=f"write what came of it into {PAGE.name}")
    given = parser.parse_args(arguments)
    if given.url:
        return _report(given, Server(given.url, given.model, given.key, given.tokenizer or ""))
    with started_server() as url:
        return _report(given, Server(url, given.model, given.key, given.tokenizer or str(demo_model_path())))


def _report(given: argparse.Namespace, server: Server) -> int:
    console, results = Console(), []
    for client in chosen(given.only):
        console.print(f"{client.name} ...")
        results.append(try_client(client, server, given.cache))
        if given.page:
            day = datetime.now(UTC).date()
            PAGE.write_text(page_with(PAGE.read_text(), results[-1:], day))
    console.print(table(results))
    return int(any(result.outcome is Outcome.FAILED for result in results))


if __name__ == "__main__":
    sys.exit(main())
