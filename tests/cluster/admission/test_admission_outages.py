"""What admission does while replicas are slow, or gone for a moment, or for good: its bounds and promises hold."""

import asyncio
from contextlib import aclosing
from random import Random

import pytest

from cluster.config import parse_config
from cluster.errors import ApiError
from cluster.router.dispatcher import Dispatcher
from cluster.router.live_model import admission_queue, dispatcher_config
from cluster.simulator.engine import StepTimes
from cluster.wire.link import LOST
from engine.errors import ConfigError
from engine.request import Request
from engine.sampling_params import SamplingParams
from tests.simulator.cluster import SimulatedModel, simulated_replica
from tests.simulator.links import connect_local
from tests.simulator.virtual_time import run_virtually

SLOW_STEP = 3.5  # seconds: longer than a replica counts as ready without one (`stall_timeout`)
TOKENS = 4
INFLIGHT = 6


class Outage:
    """A router with its admission queue over one simulated replica, whose link can be cut and made again.

    base: seconds of a step. begins: whether there is a replica from the start.
    """

    def __init__(self, base: float, begins: bool = True, **settings) -> None:
        self._begins = begins
        self.model = SimulatedModel(max_num_seqs=64, max_model_len=1024, step_times=StepTimes(base=base))
        config = parse_config({"model": "demo", "max_inflight": INFLIGHT} | settings)
        self.dispatcher = Dispatcher(dispatcher_config(config), Random(0))
        self.admission = admission_queue(config, self.dispatcher)
        self.most_inside = 0
        self._cores = []
        self._link = None

    async def __aenter__(self):
        if self._begins:
            await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.dispatcher.close()
        for core in self._cores:
            await core.close()

    async def start(self) -> None:
        self._cores.append(simulated_replica(f"replica-{len(self._cores)}", self.model))
        self._link = await connect_local(self._cores[-1].serve, "router-0")
        self.dispatcher.add_link(self._link)

    def kill(self) -> None:
        self._link.close(LOST, "killed")

    async def ask(self, name: str, tenant: str = "t") -> str:
        """Run a request; return "whole", or the code of its error."""
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0)
        tokens = 0
        try:
            async with aclosing(self.admission.generate(tenant, Request(name, (1,) * 8, params))) as chunks:
                async for chunk in chunks:
                    self.most_inside = max(self.most_inside, self.admission.num_inside)
                    tokens += len(chunk.token_ids)
        except ApiError as error:
            assert error.status != 503 or error.retry_after >= 1
            return error.code
        return "whole" if tokens == TOKENS else "short"

    def ask_many(self, number: int, tenant: str = "t") -> list[asyncio.Task[str]]:
        return [asyncio.create_task(self.ask(f"{tenant}{i}", tenant)) for i in range(number)]


async def after(seconds: float, work):
    """Return what `work` brings, and how many seconds it took once `seconds` had passed."""
    await asyncio.sleep(seconds)
    began = asyncio.get_running_loop().time()
    return await work, asyncio.get_running_loop().time() - began


def test_steps_longer_than_the_stall_timeout_open_no_gate_and_a_light_tenant_is_served_in_its_turn():
    async def play():
        async with Outage(SLOW_STEP, max_queue_wait=3600) as outage:
            herd = outage.ask_many(100, "heavy")
            await asyncio.sleep(SLOW_STEP * 1.5)
            light, seconds = await after(0, asyncio.gather(*outage.ask_many(3, "light")))
            assert outage.admission.num_inside <= INFLIGHT
            ends = await asyncio.gather(*herd)
            assert outage.most_inside <= INFLIGHT
        assert light == ["whole"] * 3
        # Those inside end, then it is its turn; and it may take turns with the other.
        assert seconds <= 4 * TOKENS * SLOW_STEP
        assert ends == ["whole"] * 100

    run_virtually(play())


def test_those_who_wait_keep_their_patience_when_all_replicas_are_gone_for_a_moment():
    async def play():
        async with Outage(0.2) as outage:
            tasks = outage.ask_many(100)
            await asyncio.sleep(0.3)
            outage.kill()
            await asyncio.sleep(1.5)
            assert outage.admission.num_inside <= INFLIGHT
            await outage.start()
            ends = await asyncio.gather(*tasks)
            assert outage.most_inside <= INFLIGHT
        assert ends == ["whole"] * 100

    run_virtually(play())


def test_without_a_replica_who_comes_is_refused_within_a_second_however_many_wait_already():
    async def play():
        async with Outage(0.2) as outage:
            tasks = outage.ask_many(100)
            await asyncio.sleep(0.3)
            outage.kill()
            late = outage.ask_many(20, "late")
            end, seconds = await after(0.5, outage.ask("later"))
            assert end == "no_replica"
            assert seconds <= 1.001
            assert {await one for one in late} == {"no_replica"}
            assert outage.admission.num_inside <= INFLIGHT
            ends, seconds = await after(0, asyncio.gather(*tasks))
        assert set(ends) == {"replica_lost", "no_replica"}
        assert ends.count("replica_lost") == INFLIGHT
        assert seconds < 120.0, "their patience, and no longer"

    run_virtually(play())


def test_who_came_while_none_was_there_waits_as_long_as_anyone_once_one_is():
    async def play():
        async with Outage(0.2) as outage:
            running = outage.ask_many(50)
            await asyncio.sleep(0.3)
            outage.kill()
            late = outage.ask_many(20, "late")
            await asyncio.sleep(0.5)
            await outage.start()
            ends = await asyncio.gather(*running, *late)
        assert ends == ["whole"] * 70

    run_virtually(play())


def test_the_bounds_hold_before_a_first_replica_was_seen():
    async def play():
        async with Outage(0.2, begins=False, max_inflight=None, max_num_seqs=4, routers=2) as outage:
            tasks = outage.ask_many(50)
            await asyncio.sleep(0.5)
            assert 0 < outage.admission.num_inside <= 4, "half of a replica's sequences, and a little more"
            ends, seconds = await after(0, asyncio.gather(*tasks))
        assert set(ends) == {"no_replica"}
        assert 0.5 + seconds <= 1.001

    run_virtually(play())


def test_what_ran_waits_for_another_replica_as_long_as_a_start_may_take():
    async def play():
        async with Outage(0.2) as outage:
            tasks = outage.ask_many(INFLIGHT)
            await asyncio.sleep(0.3)
            outage.kill()
            await asyncio.sleep(parse_config({"model": "demo"}).cold_start_timeout - 1)
            await outage.start()
            assert await asyncio.gather(*tasks) == ["whole"] * INFLIGHT

    run_virtually(play())


@pytest.mark.parametrize(("settings", "patience"), [({"cold_start_timeout": 7}, 7), ({"no_replica_timeout": 5}, 5)])
def test_how_long_that_is_can_be_set(settings, patience):
    async def play():
        async with Outage(0.2, **settings) as outage:
            tasks = outage.ask_many(INFLIGHT)
            await asyncio.sleep(0.3)
            outage.kill()
            ends, seconds = await after(0, asyncio.gather(*tasks))
        assert ends == ["replica_lost"] * INFLIGHT
        assert abs(seconds - patience) < 0.01

    run_virtually(play())


def test_a_patience_that_cannot_be_is_refused_by_name():
    with pytest.raises(ConfigError, match="no_replica_timeout"):
        parse_config({"model": "demo", "no_replica_timeout": 0})
