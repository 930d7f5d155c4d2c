"""Latency of the driver-to-worker channel and of a sum over two ranks of one host.

`python -m tests.bench.channel` prints it, `measure()` returns it.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from unittest.mock import patch

import torch

from parallel import host_group
from parallel.channel import BroadcastChannel, Channel
from parallel.errors import ChannelClosed
from parallel.message_ring import SharedMemoryRing
from parallel.rendezvous import Rendezvous, RendezvousAddress
from parallel.torch_group import connect

MESSAGE = bytes(range(256)) * 16  # 4 KB
TIMEOUT = 30.0


def measure(rounds: int = 2000, pause: float = 0.0) -> dict[str, float]:
    """Return median microseconds of one 4 KB message to a worker, as half a round trip, per kind of channel.

    pause: seconds of rest between round trips, longer than the spin to measure the wake-up from parking.
    """
    context = multiprocessing.get_context("spawn")
    here, far = context.Pipe()
    with SharedMemoryRing.create(1) as ring_there, Rendezvous.create() as rendezvous, here:
        worker = context.Process(target=_worker, args=(ring_there.name, rendezvous.address, far), daemon=True)
        worker.start()
        try:
            with SharedMemoryRing.attach(here.recv(), 0) as ring_back:
                ring = _round_trips(ring_there, ring_back, rounds, pause)
            ring_there.close()
            with (
                connect(0, 2, rendezvous, "cpu", TIMEOUT) as there,
                connect(1, 2, here.recv(), "cpu", TIMEOUT) as back,
                BroadcastChannel(there) as send,
            ):
                sockets = _round_trips(send, BroadcastChannel(back), max(1, rounds // 10), pause)
            worker.join(TIMEOUT)
        finally:
            worker.kill()
            worker.join()
    sums = {f"all_reduce_4kb_{name}us": round(_sums(rounds, name), 2) for name in ("", "python_")}
    return {"ring_4kb_us": round(ring, 2), "broadcast_4kb_us": round(sockets, 2), **sums}


def _sums(rounds: int, name: str) -> float:
    """Return the median microseconds of a sum of 4 KB over two ranks; name: "python_" = as without a compiler."""
    context = multiprocessing.get_context("spawn")
    with Rendezvous.create() as rendezvous:
        worker = context.Process(target=_adding_worker, args=(rendezvous.address, rounds, name), daemon=True)
        worker.start()
        try:
            return _add(0, rendezvous, rounds, name)
        finally:
            worker.kill()
            worker.join()


def _adding_worker(address: RendezvousAddress, rounds: int, name: str) -> None:
    _add(1, address, rounds, name)


def _add(rank: int, where: Rendezvous | RendezvousAddress, rounds: int, name: str) -> float:
    torch.set_num_threads(1)
    library = (lambda: None) if name else host_group.exchange_library
    taken = []
    with patch.object(host_group, "exchange_library", library), connect(rank, 2, where, "cpu", TIMEOUT) as group:
        x = torch.zeros(len(MESSAGE) // 4)
        for _ in range(rounds):
            began = time.perf_counter()
            group.all_reduce(x)
            taken.append(time.perf_counter() - began)
        group.barrier()
    return statistics.median(taken) * 1e6


def _round_trips(send: Channel, receive: Channel, rounds: int, pause: float) -> float:
    taken = []
    for _ in range(rounds):
        time.sleep(pause)
        began = time.perf_counter()
        send.send(MESSAGE, TIMEOUT)
        receive.receive(TIMEOUT)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) / 2 * 1e6


def _worker(ring_there: str, address: RendezvousAddress, pipe: Connection) -> None:
    with SharedMemoryRing.create(1) as ring_back, SharedMemoryRing.attach(ring_there, 0) as ring:
        pipe.send(ring_back.name)
        _echo(ring, ring_back)
    with Rendezvous.create() as rendezvous, connect(1, 2, address, "cpu", TIMEOUT) as there:
        pipe.send(rendezvous.address)
        with connect(0, 2, rendezvous, "cpu", TIMEOUT) as back, BroadcastChannel(back) as send:
            _echo(BroadcastChannel(there), send)


def _echo(receive: Channel, send: Channel) -> None:
    with suppress(ChannelClosed):
        while True:
            send.send(receive.receive(TIMEOUT), TIMEOUT)


if __name__ == "__main__":
    print(json.dumps(measure() | {f"{key}_parked": value for key, value in measure(200, 0.002).items()}))
