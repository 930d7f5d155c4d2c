"""One rank of a tensor-parallel group: how it joins, what the driver sends it each step, and its loop."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from typing_extensions import override

from engine.config import EngineConfig
from engine.device.machine import settle_heap
from engine.inputs.step_messages import StepReader
from engine.report import RankTimes
from engine.threads import ThreadShare
from engine.worker.runner import START_TIMEOUT, ModelRunner
from engine.worker.sleep import TAGS
from parallel.channel import BroadcastChannel, Buffer, Channel, ChannelMessage, pack, unpack
from parallel.errors import ChannelClosed, RendezvousError
from parallel.group import Group
from parallel.message_ring import SharedMemoryRing
from parallel.rendezvous import Rendezvous, RendezvousAddress
from parallel.torch_group import connect

ARRIVALS = "arrivals"  # part of the rendezvous where workers leave word that they have started
SLEEP = 2  # kinds of messages beside `STEP`: sleep at the level that the message is numbered with
WAKE = 3  # wake the one of `TAGS` that the message is numbered with
OnStep = Callable[[RankTimes], None]


def worker_main(
    config: EngineConfig,
    rank: int,
    size: int,
    rendezvous_address: RendezvousAddress,
    channel_handle: str | None,
    on_step: OnStep | None = None,
) -> None:
    """Be rank 1 or more of a group until the driver closes the channel; blocks, in a process of its own.

    config: resolved by the driver. channel_handle: name of the driver's shared-memory ring, None for ranks on other
    hosts, whose steps come over a broadcast. on_step: called with the times of each step. Raises what ends this rank:
    the whole worker group must then be ended.
    """
    rendezvous = Rendezvous.join(rendezvous_address, START_TIMEOUT)
    rendezvous.store(ARRIVALS, START_TIMEOUT).set(str(rank), "here")
    with (
        ThreadShare(size, config) as threads,
        join_group(config, rank, size, rendezvous) as group,
        open_channel(group, rendezvous, channel_handle) as channel,
    ):
        threads.bind_thread()
        runner = ModelRunner(config, group)
        settle_heap()
        try:
            serve_steps(runner, channel, on_step)
        finally:
            runner.close()


def run_worker(
    rank: int, config: EngineConfig, size: int, rendezvous_address: RendezvousAddress, channel_handle: str
) -> None:
    """`worker_main` with its arguments in the order of `parallel.launcher`."""
    worker_main(config, rank, size, rendezvous_address, channel_handle)


def await_workers(rendezvous: Rendezvous, size: int, check: Callable[[], None]) -> None:
    """Wait until ranks 1 to `size - 1` have started; `check` raises when one of them has ended instead.

    Raises `RendezvousError` naming the ranks that did not come in time.
    """
    store = rendezvous.store(ARRIVALS, START_TIMEOUT)
    deadline = time.monotonic() + START_TIMEOUT
    missing = [str(rank) for rank in range(1, size)]
    while missing := [rank for rank in missing if not store.check(rank)]:
        check()
        if time.monotonic() > deadline:
            raise RendezvousError(f"ranks {', '.join(missing)} did not start within {START_TIMEOUT:g} s")
        time.sleep(0.02)


class ControlChannel(BroadcastChannel):
    """A channel over a group that it owns."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._owned = group

    @override
    def close(self) -> None:
        super().close()
        self._owned.close()


def serve_steps(runner: ModelRunner, channel: Channel, on_step: OnStep | None = None) -> None:
    """Run the steps that come down the channel until it is closed, and sleep in between when ordered to.

    on_step: called with the times of each step. Raises `ChannelError` for what is no such message.
    """
    steps = StepReader(runner.block_table)
    ended = time.perf_counter()
    while True:
        try:
            message = unpack(channel.receive())
        except ChannelClosed:
            return
        if message.kind in (SLEEP, WAKE):
            _sleep_or_wake(runner, message)
            ended = time.perf_counter()
            continue
        received = time.perf_counter()
        runner.execute(steps.read(message))
        waited, ended = received - ended, time.perf_counter()
        if on_step is not None:
            on_step(RankTimes(waited, ended - received))


def join_group(
    config: EngineConfig, rank: int, size: int, rendezvous: Rendezvous | RendezvousAddress | None
) -> Group:
    """Meet the other ranks. rendezvous: rank 0's own, its address elsewhere, None in a group of one.

    Raises `RendezvousError` when they do not come in time.
    """
    device = device_of(config, rank)
    return connect(
        rank,
        size,
        rendezvous,
        device,
        START_TIMEOUT,
        collective_timeout=config.step_timeout,
        fixed_order=config.batch_invariant,
    )


def open_channel(group: Group, rendezvous: Rendezvous | RendezvousAddress, handle: str | None) -> Channel:
    """Open a worker's end of the channel, or with no handle any rank's end of one over a broadcast."""
    if handle is not None:
        return SharedMemoryRing.attach(handle, reader=group.rank - 1)
    # A group of its own, on the host: an idle wait must not count against the collectives' deadline.
    return ControlChannel(connect(group.rank, group.size, rendezvous, "cpu", START_TIMEOUT, name="control"))


def device_of(config: EngineConfig, rank: int) -> str:
    """Return this rank's device: the GPU of its number among those that it sees (under Ray only its own)."""
    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return f"cuda:{rank % torch.cuda.device_count()}" if device == "cuda" else device


def pack_sleep(level: int) -> Buffer:
    """Return the order to sleep as a message for the channel."""
    return pack(ChannelMessage(SLEEP, level))


def pack_wake(tag: str) -> Buffer:
    """Return the order to wake one of `TAGS` up as a message for the channel."""
    return pack(ChannelMessage(WAKE, TAGS.index(tag)))


def _sleep_or_wake(runner: ModelRunner, message: ChannelMessage) -> None:
    if message.kind == SLEEP:
        runner.sleep(message.number)
    else:
        runner.wake(TAGS[message.number])
