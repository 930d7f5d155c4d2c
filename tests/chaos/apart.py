"""Two ranks on a network of their own that is taken from under them. Run by test_ranks.py inside a network namespace.

As on two hosts, steps and collectives go over sockets. Prints what the engine said when the network was gone.
"""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

from deploy.demo import demo_model_path
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import EngineDeadError
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.worker.executor_start import drive_worker_group, prepare_model
from engine.worker.worker import run_worker
from parallel.errors import ChannelError
from parallel.launcher import launch
from parallel.rendezvous import Rendezvous
from parallel.shared_memory import Segment

STEP_TIMEOUT = 2.0


def no_segment(size: int) -> Segment:
    """Ranks on two hosts share no memory."""
    raise ChannelError(f"no {size} bytes are shared between hosts")


def main() -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    folder, config = prepare_model(
        EngineConfig(str(demo_model_path()), device="cpu", tensor_parallel_size=2, step_timeout=STEP_TIMEOUT)
    )
    Segment.create = staticmethod(no_segment)  # type: ignore[method-assign, assignment]
    rendezvous = Rendezvous.create()
    workers = launch(2, run_worker, (config, 2, rendezvous.address, None))
    executor, info = drive_worker_group(config, folder, rendezvous, None, workers)
    core = EngineCore(info.config, executor, info.eos_token_ids, info.vocab_size, info.num_kv_blocks)
    core.add(Request("r", (5, 6, 7), SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)))
    for _ in range(10):
        assert len(core.step().token_ids) == 1
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    began = time.monotonic()
    try:
        for _ in range(10):
            core.step()
    except EngineDeadError as error:
        print(f"dead after {time.monotonic() - began:.1f} s: {error}")
    left = [process for pid in workers.pids if (process := _process(pid)) is not None]
    print(f"{len(left)} ranks left")
    sys.exit(0)


def _process(pid: int) -> psutil.Process | None:
    return psutil.Process(pid) if psutil.pid_exists(pid) else None


if __name__ == "__main__":
    main()
