"""`squadron serve` beside `vllm serve` and Ray Serve LLM, on one machine, with one model and the same prompts.

    python -m tests.bench.peers install vllm ray-llm
    python -m tests.bench.peers.served [--streams 1 8 32 128] [--rounds 3] [--turns 1] [--only squadron vllm ray]
    python -m tests.bench.peers.served --streams 1 8 --rounds 1     whether all of them work

Each server is started in turn, as its users do, and none runs beside it; the cores are shared out among its replicas.
It is warmed up, and asked in rounds for each number of streams at once; `--turns` starts all of them anew, so that a
machine that grows slower does so for all. Told are the time to the first token, tokens/s, and CPU seconds of all of
its processes, those of Ray included, per 1,000 tokens; in float32 also how many texts are those of `squadron serve`.
It prints Markdown. What is not installed or fails is left out by name, with the reason.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from pathlib import Path

from tests.bench.machine import provenance
from tests.bench.peers.__main__ import positive, tell
from tests.bench.peers.comparison import DTYPES
from tests.bench.peers.environments import default_root
from tests.bench.peers.served.comparison import REPLICAS, STREAMS, compare
from tests.bench.peers.served.servers import SERVERS
from tests.bench.peers.served.table import markdown

PROGRAM = "python -m tests.bench.peers.served"


def main(arguments: list[str] | None = None) -> int:
    """Compare; return the exit status."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--root", type=Path, default=default_root(), help="of the environments (default: %(default)s)"
    )
    parser.add_argument("--streams", nargs="+", type=positive, default=STREAMS, help="at once (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="of each start (default: %(default)s)")
    parser.add_argument("--turns", type=positive, default=1, help="starts of each server (default: %(default)s)")
    parser.add_argument("--replicas", nargs="+", type=positive, default=REPLICAS, help="default: %(default)s")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES[:1], help="default: %(default)s")
    parser.add_argument(
        "--only", nargs="+", choices=SERVERS, default=list(SERVERS), metavar="SERVER", help=f"of {', '.join(SERVERS)}"
    )
    parser.add_argument("--output", type=Path, help="write the Markdown there, too")
    options = parser.parse_args(arguments)
    # Ray leaves a number of threads alone that is set already, and each server has its own way to be told.
    os.environ.pop("OMP_NUM_THREADS", None)
    origin = provenance()
    found = compare(
        options.root.expanduser().absolute(), servers=[SERVERS[name] for name in SERVERS if name in options.only],
        streams=options.streams, replicas=options.replicas, dtypes=options.dtypes, rounds=options.rounds,
        turns=options.turns, partial=True, tell=tell,
    )  # fmt: skip
    given = sys.argv[1:] if arguments is None else arguments
    text = markdown(found, origin, shlex.join([*PROGRAM.split(), *given]))
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    return 0 if found.rounds else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which would leave the server that runs
    sys.exit(main())
