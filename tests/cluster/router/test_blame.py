"""Whom a router blames for the end of a link: requests that a replica computed when it died, and nobody else."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from random import Random

import pytest

from cluster.errors import ApiError
from cluster.router.dispatcher import Dispatcher
from cluster.wire.link import DAMAGED, ENGINE_DEAD, LOST, SUPERSEDED, LinkAddress, LinkClosedError, RouterLink
from cluster.wire.replica_messages import Begun, Welcome
from cluster.wire.router_messages import Ping, Submit
from cluster.wire.tcp import connect
from tests.cluster.cluster_lab import until
from tests.cluster.router.outage_lab import OutageLab, asked
from tests.engine.engine_driver import request
from tests.simulator.links import FaultyLink, connect_local
from tests.simulator.virtual_time import run_virtually

ROUNDS = 5  # replicas that end one after the other: two more than a request may kill


class Ending:
    """A router with default settings and replicas that take up a request, compute it or not, and end their link.

    asked: how many replicas were asked to run it.
    """

    def __init__(self) -> None:
        self.asked = 0
        self._links: list[FaultyLink] = []
        self._submitted = asyncio.Event()
        self.dispatcher = Dispatcher(rng=Random(0))

    async def join(self, life: int, begins: bool = True, name: str = "") -> FaultyLink:
        """Have a life of a replica join the router, and run the request until then; return the link."""

        async def serve(link: RouterLink) -> None:
            link.send(Welcome(name or f"replica-{life}", life, "fake", 32768, 32000, 16, 4096))
            try:
                while True:
                    message = await link.receive()
                    if isinstance(message, Submit):
                        if begins:
                            link.send(Begun([message.stream]))
                        self.asked += 1
                        self._submitted.set()
                    elif isinstance(message, Ping):
                        link.send(Begun([]))  # a word is a word
            except LinkClosedError:
                return

        self._submitted.clear()
        link = FaultyLink(await connect_local(serve, "router"))
        self._links.append(link)
        self.dispatcher.add_link(link)
        await asyncio.wait([asyncio.create_task(self._submitted.wait())], timeout=1.0)
        await asyncio.sleep(0.1)
        return link

    async def close(self) -> None:
        await self.dispatcher.close()
        for link in self._links:
            link.release()
            await link.wait_closed()


async def outcome(lab: Ending, ending: str, begins: bool) -> str:
    """Have replicas end in one way while they run a request; return the code of its end, "lives" if it has none."""

    async def run() -> None:
        async for _ in lab.dispatcher.generate(asked(0, 100, 5)):
            raise AssertionError("nobody computes a token here")

    running = asyncio.create_task(run())
    for life in range(ROUNDS):
        same = ending == "found again"
        name = "same" if same or ending.endswith("anew") else ""
        link = await lab.join(7 if same else life, begins, name)
        if running.done():
            break
        if ending in (ENGINE_DEAD, LOST, DAMAGED, SUPERSEDED):
            link.cut(ending)
        elif ending.startswith("lost and"):
            link.cut(LOST)
            await asyncio.sleep(0.1)
        elif same:
            link.cut(LOST)
        else:
            link.hold()
            await asyncio.sleep(4.0)
        if ending.endswith("gone"):
            lab.dispatcher.remove_replica(f"replica-{life}")
        await asyncio.sleep(0.1)
    try:
        if not running.done():
            return "lives"
        await running
        raise AssertionError("nobody has answered")
    except ApiError as error:
        return error.code
    finally:
        running.cancel()
        await lab.close()


GUILTY = "request_quarantined"


@pytest.mark.parametrize(
    ("ending", "begins", "end", "replicas"),
    [
        (ENGINE_DEAD, True, GUILTY, 3),
        ("lost and gone", True, GUILTY, 3),
        ("lost and come anew", True, GUILTY, 3),
        (LOST, True, "lives", 3),
        ("silent and gone", True, GUILTY, 3),
        (ENGINE_DEAD, False, "lives", ROUNDS),
        (LOST, False, "lives", ROUNDS),
        ("lost and gone", False, "lives", ROUNDS),
        ("silent and gone", False, "lives", ROUNDS),
        ("found again", True, "lives", ROUNDS),
        (DAMAGED, True, "lives", ROUNDS),
        (SUPERSEDED, True, "lives", ROUNDS),
    ],
)
def test_only_the_confirmed_death_of_a_replica_that_computed_it_speaks_against_a_request(
    ending, begins, end, replicas
):
    async def main():
        lab = Ending()
        assert await outcome(lab, ending, begins) == end
        assert lab.asked == replicas

    run_virtually(main())


def test_a_request_under_which_three_replicas_fell_silent_waits_for_word_of_them():
    """Whether they have died is not known: it is neither told that it is to blame, nor given a fourth one now."""

    async def main():
        lab = Ending()
        assert await outcome(lab, "silent", True) == "lives"
        assert lab.asked == 3

    run_virtually(main())


def test_many_suspects_are_through_in_few_rounds():
    """Two replicas are killed in one step of many short prompts: all of those could be the cause of both."""

    async def main():
        async with OutageLab(["a"]) as lab:
            running = lab.ask(asked(i, 40, 4) for i in range(200))
            for name in ("b", "c"):
                await asyncio.sleep(0.005)  # the first step runs
                lab.kill(next(iter(lab.replicas)))
                await lab.start(name)
            began = asyncio.get_running_loop().time()
            assert set(await asyncio.gather(*running)) == {"whole"}
            return asyncio.get_running_loop().time() - began

    assert run_virtually(main()) < 1.0, "1.4 s where the 64 that were computed twice go one at a time"


def test_the_one_that_kills_is_found_among_many():
    """It costs one replica more than it would alone, and nobody else an error."""

    async def main():
        async with OutageLab(["a", "b"], poison="r7", revives=True) as lab:
            ends = await asyncio.gather(*lab.ask(asked(i, 40, 4) for i in range(200)))
            assert ends.pop(7) == GUILTY
            assert set(ends) == {"whole"}
            assert 3 <= len(lab.lost) <= 4

    run_virtually(main())


POISON = 60  # a token
# A replica that is gone with the first instruction of the step that computes the token. Its engine's thread gives way
# to its event loop only where it waits.
MORTAL_REPLICA = """
import asyncio, json, os, signal, sys
from cluster.wire.tcp import LinkServer
from cluster.replica.sessions import ReplicaTimes
from tests.cluster.cluster_lab import GatedExecutor, LabReplica

class Mortal(GatedExecutor):
    def execute(self, inputs, sampling):
        if int(sys.argv[2]) in inputs.input_ids:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute(inputs, sampling)

async def main():
    replica = LabReplica(sys.argv[1], Mortal(64), 64, ReplicaTimes())
    address = await LinkServer(replica.core.serve).start()
    print(json.dumps([address.host, address.port, address.secret]), flush=True)
    await asyncio.Event().wait()

sys.setswitchinterval(1.0)
asyncio.run(main())
"""


async def test_a_request_that_ends_processes_with_its_first_step_is_quarantined():
    """Killed for real, before anything of the step can be told: that it had begun is known all the same."""
    processes = []

    async def start(name: str) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", MORTAL_REPLICA, name, str(POISON), stdout=PIPE
        )
        processes.append(process)
        address = LinkAddress(*json.loads(await process.stdout.readline()))
        link = await connect(address, "router")
        dispatcher.add_link(link)
        await link.wait_closed()
        await process.wait()
        dispatcher.remove_replica(name)  # as Serve says

    async def run() -> None:
        async for _ in dispatcher.generate(request("p", (1, 2, POISON), max_tokens=5)):
            raise AssertionError("nobody lives to compute a token")

    dispatcher = Dispatcher(rng=Random(0))
    try:
        lives = [asyncio.create_task(start(name)) for name in "abcdef"]
        await until(lambda: len(dispatcher.replicas()) == len(lives), 30.0)
        with pytest.raises(ApiError) as caught:
            await asyncio.wait_for(run(), 30)
        assert caught.value.code == GUILTY
        assert sum(dispatcher.counters.links_lost.values()) <= 4, "the first one's may not be known"
    finally:
        await dispatcher.close()
        for life in lives:
            life.cancel()
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()
