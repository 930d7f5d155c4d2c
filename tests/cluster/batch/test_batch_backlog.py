"""Rows of several batches share what there is: by tenant and by tokens, and nothing is lost when one stops."""

import asyncio
from random import Random
from types import SimpleNamespace

import pytest

from cluster.batch.run.backlog import Backlog
from cluster.batch.server.batch_runner import TenantTurns
from tests.cluster.batch.batch_lab import cut_off


class Fixed:
    """Bounds that a test sets."""

    def __init__(self, sequences, tokens=10**9):
        self.most, self.most_tokens = sequences, tokens

    def sequences(self):
        return self.most

    def tokens(self):
        return self.most_tokens


def row(number, prompt=2, sequences=1):
    return SimpleNamespace(
        task=SimpleNamespace(row=number), num_sequences=sequences, num_prompt_tokens=prompt, requests=()
    )


async def settled():
    for _ in range(5):
        await asyncio.sleep(0)


async def endless(lane, entered, name, rows=10**6, **more):
    """A batch that has always another row."""
    for number in range(rows):
        await lane.enter(row(number, **more))
        entered.append((name, lane, number))


async def test_a_newcomer_has_the_next_place_that_is_free():
    backlog, entered = Backlog(Fixed(4)), []
    first = asyncio.create_task(endless(backlog.of("a"), entered, "a"))
    await settled()
    late = asyncio.create_task(endless(backlog.of("b"), entered, "b", rows=2))
    await settled()
    assert [name for name, *_ in entered] == ["a"] * 4
    for place in (0, 1):
        _, lane, number = entered[place]
        lane.leave(number, 50)
        await settled()
    assert [name for name, *_ in entered[4:]] == ["b", "b"]
    await late
    await cut_off(first)


@pytest.mark.parametrize("most", [1, 4])
async def test_tenants_get_the_same_tokens_whatever_their_rows_take(most):
    backlog, entered, used = Backlog(Fixed(most)), [], {"a": 0, "b": 0}
    output = {"a": 90, "b": 10}
    work = [asyncio.create_task(endless(backlog.of(one), entered, one)) for one in output]
    for done in range(2000):
        await settled()
        name, lane, number = entered[done]
        lane.leave(number, output[name])
        used[name] += 2 + 1 + output[name]  # prompt, sequence, output
    assert used["a"] == pytest.approx(used["b"], rel=0.05)
    for one in work:
        await cut_off(one)


async def test_alone_a_tenant_gets_everything_and_owes_nothing_for_it():
    backlog, entered = Backlog(Fixed(2)), []
    alone = asyncio.create_task(endless(backlog.of("a"), entered, "a"))
    for done in range(100):
        await settled()
        assert len(entered) == done + 2
        entered[done][1].leave(entered[done][2], 1000)
    work = asyncio.create_task(endless(backlog.of("b"), entered, "b"))
    await settled()
    before = len(entered)
    for done in range(100, 140):
        entered[done][1].leave(entered[done][2], 10)
        await settled()
    assert sum(name == "a" for name, *_ in entered[before:]) >= 15
    await cut_off(alone)
    await cut_off(work)


async def test_what_is_recalled_is_so_once_and_comes_back_before_others_of_its_tenant():
    bounds, recalled, again = Fixed(4), [], []
    backlog = Backlog(bounds)
    lane, other = backlog.of("a"), backlog.of("b")
    for number in range(4):
        await lane.enter(row(number))
        lane.may_recall(number, lambda number=number: recalled.append(number))
    bounds.most = 2
    lane.adjust()
    other.adjust()  # of another batch, before the rows could leave
    assert recalled == [3, 2]
    new = asyncio.create_task(lane.enter(row(9)))
    await settled()
    for number in recalled:
        lane.leave(number, 0)
        again.append(asyncio.create_task(lane.enter(row(number), first=True)))
    await settled()
    bounds.most = 3
    other.adjust()
    await settled()
    assert sum(one.done() for one in again) + new.done() == 1
    bounds.most = 4
    other.adjust()
    await settled()
    bounds.most = 5
    other.adjust()
    await asyncio.gather(new, *again)


async def test_a_row_larger_than_all_waits_for_its_room_and_is_passed_by_nobody():
    backlog, entered = Backlog(Fixed(8, 100)), []
    small = asyncio.create_task(endless(backlog.of("a"), entered, "a", prompt=30))
    await settled()
    large = asyncio.create_task(endless(backlog.of("b"), entered, "b", rows=1, prompt=1000))
    await settled()
    for done in range(3):
        entered[done][1].leave(entered[done][2], 0)
        await settled()
    assert [name for name, *_ in entered] == ["a"] * 3 + ["b"]
    await large
    await cut_off(small)


@pytest.mark.parametrize("seed", range(20))
async def test_batches_that_stop_at_any_moment_leave_all_their_room(seed):
    draw, backlog, lanes = Random(seed), Backlog(Fixed(3, 200)), {}

    async def batch(lane):
        number = 0
        while True:
            await lane.enter(row(number, prompt=draw.randint(1, 150), sequences=draw.randint(1, 3)))
            if draw.random() < 0.5:
                lane.make_room(number)
            if draw.random() < 0.6:
                lane.leave(number, draw.randint(0, 50))
            number += 1
            await asyncio.sleep(0)

    for step in range(300):
        if len(lanes) < 4:
            lane = backlog.of(draw.choice("abc"))
            lanes[step] = lane, asyncio.create_task(batch(lane))
        for _ in range(draw.randint(0, 3)):
            await asyncio.sleep(0)
        if draw.random() < 0.4:
            lane, work = lanes.pop(draw.choice(list(lanes)))
            await cut_off(work)
            lane.close()
    for lane, work in lanes.values():
        await cut_off(work)
        lane.close()
    last = backlog.of("d")
    for number in range(3):
        await asyncio.wait_for(last.enter(row(number)), 1)


async def test_a_tenants_batches_run_one_by_one_as_they_were_made_and_others_beside_them():
    turns, ran, go = TenantTurns(), [], asyncio.Event()

    async def run(tenant, batch_id):
        async with turns.turn(tenant, batch_id):
            ran.append(batch_id)
            await go.wait()

    first = asyncio.create_task(run("a", "a-1"))
    await settled()
    later = [asyncio.create_task(run(one[0], one)) for one in ("a-3", "a-2", "b-1", "a-4")]
    await settled()
    assert ran == ["a-1", "b-1"]
    assert turns.running("a") == "a-1"
    await cut_off(later[3])
    go.set()
    await asyncio.gather(first, *later[:3])
    assert ran == ["a-1", "b-1", "a-2", "a-3"]
    assert turns.running("a") is None


async def test_a_batch_that_is_called_and_told_to_stop_at_once_hands_its_turn_on():
    turns, ran = TenantTurns(), []

    async def run(batch_id, until):
        async with turns.turn("a", batch_id):
            ran.append(batch_id)
            await until.wait()

    end = asyncio.Event()
    work = [asyncio.create_task(run(f"a-{number}", end)) for number in range(3)]
    await settled()
    work[0].cancel()
    await asyncio.sleep(0)  # it lets go, and calls the next one, which has not run yet
    work[1].cancel()
    end.set()
    await asyncio.gather(*work, return_exceptions=True)
    assert ran == ["a-0", "a-2"]
    assert turns.running("a") is None
