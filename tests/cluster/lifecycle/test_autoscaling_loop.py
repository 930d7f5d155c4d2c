"""The whole loop in virtual time: real router, queue and schedulers, and replicas that take time to start."""

import asyncio
from contextlib import aclosing
from itertools import pairwise
from types import SimpleNamespace

import pytest

from cluster.config import parse_config, scaling_settings
from cluster.errors import ApiError
from cluster.lifecycle.autoscaling_policy import Scaler, read_stats, replica_stats
from cluster.router.dispatcher_config import DispatcherConfig
from cluster.router.live_model import admission_queue
from engine.request import Request
from engine.sampling_params import SamplingParams
from tests.simulator.cluster import SimulatedCluster, SimulatedModel, simulated_replica
from tests.simulator.links import connect_local
from tests.simulator.virtual_time import run_virtually

SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 256}
SCALING = {"min_replicas": 1, "max_replicas": 4, "upscale_delay_s": 3, "downscale_delay_s": 30}
MODEL = SimulatedModel(num_kv_blocks=512, max_model_len=1024, **SIZES)
STARTS_IN, REPORTS = 5.0, 2.0  # seconds
TOKENS = 40  # of each answer: one replica gives some twelve answers a second


class Controller:
    """What Serve's controller does: asks for figures, has the policy decide, starts and stops replicas."""

    def __init__(self, cluster: SimulatedCluster, config) -> None:
        self.targets = [1]
        self._cluster = cluster
        self._router = cluster.routers[0]
        self._scaler = Scaler(scaling_settings(config))
        self._stopped: list = []
        self._number = 0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(REPORTS)
            target, running = self.targets[-1], self._cluster.replicas
            metrics: dict = {}
            for name, core in running.items():
                told = replica_stats(core.stats, SIZES["max_num_seqs"], core.prefill_wait, core.queue)
                for key, value in told.items():
                    metrics.setdefault(key, {})[name] = [SimpleNamespace(value=value)]
            chosen = self._scaler.decide(loop.time(), target, *read_stats(metrics))
            self.targets.append(chosen)
            for _ in range(max(0, chosen - target)):
                loop.call_later(STARTS_IN, lambda: asyncio.ensure_future(self._start()))
            for name in list(running)[: max(0, len(running) - chosen)]:
                self._router.remove_replica(name)
                self._stopped.append(running.pop(name))

    async def _start(self) -> None:
        if len(self._cluster.replicas) < self.targets[-1]:
            self._number += 1
            name = f"more-{self._number}"
            core = self._cluster.replicas[name] = simulated_replica(name, MODEL)
            self._router.add_link(await connect_local(core.serve, "router-0"))

    async def close(self) -> None:
        for core in self._stopped:
            await core.close()


async def load(admission, rate_at, seconds: float) -> list:
    """Send requests at a rate over time; returns for each whether it was whole, or the error's code."""

    async def one(number: int):
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0)
        tokens = 0
        try:
            async with aclosing(admission.generate("t", Request(f"r{number}", (1 + number,) * 40, params))) as chunks:
                async for chunk in chunks:
                    tokens += len(chunk.token_ids)
        except ApiError as error:
            return error.code
        return tokens == TOKENS

    loop = asyncio.get_running_loop()
    tasks, begin = [], loop.time()
    while loop.time() - begin < seconds:
        tasks.append(asyncio.create_task(one(len(tasks))))
        await asyncio.sleep(1 / rate_at(loop.time() - begin))
    return await asyncio.gather(*tasks)


def played(rate_at, seconds: float) -> tuple[list[int], list]:
    async def play():
        config = parse_config({"model": "demo"} | SIZES | SCALING)
        async with SimulatedCluster(1, MODEL) as cluster:
            controller = Controller(cluster, config)
            control = asyncio.create_task(controller.run())
            ends = await load(admission_queue(config, cluster.routers[0]), rate_at, seconds)
            control.cancel()
            await asyncio.gather(control, return_exceptions=True)
            await controller.close()
        return controller.targets, ends

    return run_virtually(play())


def moves(targets: list[int]) -> tuple[int, int]:
    return sum(b > a for a, b in pairwise(targets)), sum(b < a for a, b in pairwise(targets))


@pytest.mark.parametrize("period", [10, 40])
def test_a_square_wave_on_real_figures_leads_to_no_flapping_and_no_failed_request(period):
    targets, ends = played(lambda now: 22.0 if now % period < period / 2 else 1.0, 120)
    assert set(ends) == {True}, "every request was whole"
    assert max(targets) >= 2
    ups, downs = moves(targets)
    assert ups <= 3, "from one to four at most, and never again"
    assert downs <= 1, "what was asked for too much in the first rush may go again"
    assert len(set(targets[len(targets) // 2 :])) == 1


def test_the_number_follows_a_load_that_comes_and_goes():
    targets, ends = played(lambda now: 28.0 if 5 < now < 35 else 1.0, 115)
    assert set(ends) == {True}
    assert max(targets) >= 3
    assert targets[-1] == 1
    peak = targets.index(max(targets))
    assert moves(targets[: peak + 1])[1] == 0 and moves(targets[peak:])[0] == 0, "up, then down"


@pytest.mark.parametrize(("comes_after", "ends"), [(30.0, {True}), (None, {"no_replica"})])
def test_all_that_come_to_a_model_without_replicas_wait_for_the_first_as_long_as_a_start_may_take(comes_after, ends):
    """A herd larger than one replica, and a target and a queue that would have given it up long before."""

    async def play():
        cold = {"min_replicas": 0, "max_replicas": 4, "cold_start_timeout": 40.0, "target_ttft": 2.0}
        config = parse_config({"model": "demo", "max_queue_wait": 5.0} | SIZES | cold)
        async with SimulatedCluster(0, MODEL, DispatcherConfig(admission_wait=config.cold_start_timeout)) as cluster:
            router, loop = cluster.routers[0], asyncio.get_running_loop()
            herd = asyncio.create_task(load(admission_queue(config, router), lambda _: 50.0, 0.6))
            if comes_after is not None:
                await asyncio.sleep(comes_after)
                core = cluster.replicas["first"] = simulated_replica("first", MODEL)
                router.add_link(await connect_local(core.serve, "router-0"))
            return await herd, loop.time()

    ended, seconds = run_virtually(play())
    assert len(ended) >= 25, "several times what one replica is handed"
    assert set(ended) == ends
    assert seconds < 45.0
