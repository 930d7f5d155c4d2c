"""This repository's engine beside vLLM, OpenVINO GenAI, llama.cpp and transformers, in one run on one model.

    python -m tests.bench.peers install [vllm ray-llm openvino llama.cpp llama.cpp-avx2]
    python -m tests.bench.peers [--rounds 3] [--isa avx2] [--only squadron vllm] [--dtypes float32] [--output FILE]
    python -m tests.bench.peers --dtypes int4 int8 --shape 0.6b         with quantised weights
    python -m tests.bench.peers --rounds 1 --sequences 4     whether all of them work
    python -m tests.bench.peers.served --help                the same of their servers

`install` makes an environment for each, outside of the repository (`--root`), and says what cannot be had. The
comparison prints Markdown: tokens/s of two loads of 64 sequences, milliseconds a token of one alone, and to the first
token of a prompt; beside them what the machine can do, and how many tokens of short answers are those of ours. What
is not installed or fails is skipped by name, with the reason.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from engine.kernels.compiler import isas
from tests.bench.machine import provenance
from tests.bench.offline import EVEN
from tests.bench.peers.comparison import DTYPES, QUANTISED, compare
from tests.bench.peers.engines import ENGINES, ISAS
from tests.bench.peers.environments import ENVIRONMENTS, NOT_TO_BE_HAD, InstallError, default_root, install
from tests.bench.peers.table import markdown
from tests.bench.random_model import SIZES


def main(arguments: list[str] | None = None) -> int:
    """Install or compare; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--root", type=Path, default=default_root(), help="of the environments (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=positive, default=3, help="of all engines, in turns (default: %(default)s)")
    parser.add_argument("--sequences", type=_sequences, default=EVEN[0], help="of each load (default: %(default)s)")
    parser.add_argument(
        "--isa", choices=ISAS, default="native", help="what the CPU is taken for (default: %(default)s)"
    )
    parser.add_argument(
        "--only", nargs="+", choices=ENGINES, default=list(ENGINES), metavar="ENGINE", help=f"of {', '.join(ENGINES)}"
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=(*DTYPES, *QUANTISED), help="default: float32, bfloat16 where it is fast"
    )
    parser.add_argument("--shape", choices=SIZES, default="100m", help="of the model (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="write the Markdown there, too")
    commands = parser.add_subparsers(dest="command")
    making = commands.add_parser("install", help="make the environments")
    making.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ENVIRONMENTS)} (default: all)")
    making.add_argument("--root", type=Path, default=argparse.SUPPRESS, help="the folder that they are put into")
    options = parser.parse_args(arguments)
    root = options.root.expanduser().absolute()
    if options.command == "install":
        if unknown := [name for name in options.names if name not in ENVIRONMENTS]:
            making.error(f"there is no environment {unknown[0]!r}; choose from {', '.join(ENVIRONMENTS)}")
        return install_all(options.names or list(ENVIRONMENTS), root)
    if options.isa not in (known := ("native", *isas())):
        parser.error(
            f"--isa {options.isa}: this CPU does not have it; use {', '.join(isa for isa in ISAS if isa in known)}"
        )
    origin = provenance()
    engines = [engine for name, engine in ENGINES.items() if name in options.only]
    settings = {
        "isa": options.isa,
        "rounds": options.rounds,
        "dtypes": options.dtypes,
        "sequences": options.sequences,
        "shape": options.shape,
    }
    found = compare(root, engines=engines, partial=True, tell=tell, **settings)
    text = markdown(found, origin)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    return 0


def install_all(names: list[str], root: Path) -> int:
    """Make environments; return 1 where one could not be made."""
    failed = 0
    for name in names:
        tell(f"{name}: {', '.join(ENVIRONMENTS[name].packages)} ({ENVIRONMENTS[name].why}) ...")
        try:
            install(name, root)
        except InstallError as error:
            failed = 1
            tell(f"{name} cannot be had here: {error}")
        else:
            tell(f"{name}: installed in {root / name}")
    for name, why in NOT_TO_BE_HAD.items():
        tell(f"{name} cannot be had: {why}")
    return failed


def tell(line: str) -> None:
    """Say what is going on, apart from the tables."""
    print(line, file=sys.stderr, flush=True)


def positive(text: str) -> int:
    """Return a count that a flag gives. Raises `argparse.ArgumentTypeError`."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a count; give 1 or more")
    return int(text)


def _sequences(text: str) -> int:
    if positive(text) > EVEN[0]:
        raise argparse.ArgumentTypeError(f"{text} is more than the load has; give 1 to {EVEN[0]}")
    return int(text)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which would leave the engine that runs, and its files
    sys.exit(main())
