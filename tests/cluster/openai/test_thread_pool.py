"""Work that long requests make: away from the event loop, each tenant in its turn and within its bounds."""

import asyncio
import threading

import pytest

from cluster.errors import ApiError
from cluster.http.storage import FILE_THREADS, FileThreads
from cluster.openai.thread_pool import LONG_BODY, FairThreadPool


class Jobs:
    """Work that goes on until it is let go. begun: names in the order in which threads took them."""

    def __init__(self):
        self.begun = []
        self.ended = {}

    def __call__(self, name):
        def work():
            self.begun.append(name)
            assert self.ended.setdefault(name, threading.Event()).wait(20)
            return name

        self.ended.setdefault(name, threading.Event())
        return work


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


@pytest.fixture
def jobs():
    jobs = Jobs()
    yield jobs
    for event in jobs.ended.values():
        event.set()


async def test_a_tenant_that_sends_many_leaves_a_thread_to_others(jobs):
    thread_pool = FairThreadPool(threads=3)
    many = [asyncio.create_task(thread_pool.run(LONG_BODY, jobs(f"a{i}"), "a")) for i in range(20)]
    await until(lambda: len(jobs.begun) == 2)
    other = asyncio.create_task(thread_pool.run(LONG_BODY, jobs("b"), "b"))
    await until(lambda: "b" in jobs.begun)
    jobs.ended["b"].set()
    assert await other == "b"
    assert jobs.begun == ["a0", "a1", "b"]
    for event in jobs.ended.values():
        event.set()
    assert await asyncio.gather(*many) == [f"a{i}" for i in range(20)]
    thread_pool.close()


async def test_tenants_take_turns(jobs):
    thread_pool = FairThreadPool(threads=1)
    names = ["a0", "a1", "a2", "a3", "b0", "c0"]
    tasks = [asyncio.create_task(thread_pool.run(LONG_BODY, jobs(name), name[0])) for name in names]
    order = ["a0", "a1", "b0", "c0", "a2", "a3"]
    for number, name in enumerate(order, 1):
        await until(lambda number=number: len(jobs.begun) == number)
        jobs.ended[name].set()
    assert await asyncio.gather(*tasks) == names
    assert jobs.begun == order
    thread_pool.close()


async def test_what_waits_of_one_tenant_is_bounded(jobs):
    thread_pool = FairThreadPool(threads=2, max_waiting=2 * LONG_BODY)
    tasks = [asyncio.create_task(thread_pool.run(LONG_BODY, jobs(f"a{i}"), "a")) for i in range(3)]
    await until(lambda: len(jobs.begun) == 1)
    with pytest.raises(ApiError) as refused:
        await thread_pool.run(LONG_BODY, jobs("more"), "a")
    assert (refused.value.code, refused.value.status, refused.value.retryable) == ("overloaded", 429, True)
    other = asyncio.create_task(thread_pool.run(10 * LONG_BODY, jobs("b"), "b"))  # alone it may be of any size
    await until(lambda: "b" in jobs.begun)
    for event in jobs.ended.values():
        event.set()
    assert await asyncio.gather(*tasks, other) == ["a0", "a1", "a2", "b"]
    thread_pool.close()


async def test_who_gives_up_gives_back_what_is_whose(jobs):
    thread_pool = FairThreadPool(threads=2)
    running = asyncio.create_task(thread_pool.run(LONG_BODY, jobs("running"), "a"))
    await until(lambda: jobs.begun == ["running"])
    waiting = asyncio.create_task(thread_pool.run(LONG_BODY, jobs("waiting"), "a"))
    after = asyncio.create_task(thread_pool.run(LONG_BODY, jobs("after"), "a"))
    await asyncio.sleep(0)
    running.cancel()
    waiting.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)
    assert jobs.begun == ["running"], "its thread is still at work"
    jobs.ended["running"].set()
    await until(lambda: jobs.begun == ["running", "after"])
    jobs.ended["after"].set()
    assert await after == "after"
    thread_pool.close()


async def test_an_error_of_the_work_is_the_callers():
    thread_pool = FairThreadPool()

    def fail():
        raise ValueError("no")

    for _ in range(10):  # each gives its thread back
        with pytest.raises(ValueError, match="no"):
            await thread_pool.run(LONG_BODY, fail, "a")
    assert await thread_pool.run(1, lambda: threading.current_thread()) is threading.main_thread()
    thread_pool.close()


async def test_a_tenant_that_is_at_many_files_leaves_threads_to_others(jobs):
    threads = FileThreads()
    greedy = [asyncio.create_task(threads.run(jobs(f"greedy {i}"), "greedy")) for i in range(2 * FILE_THREADS)]
    await until(lambda: len(jobs.begun) == FILE_THREADS // 2)
    meek = asyncio.create_task(threads.run(jobs("meek"), "meek"))
    await until(lambda: "meek" in jobs.begun)
    greedy[-1].cancel()  # it waits for its turn
    for event in jobs.ended.values():
        event.set()
    assert await meek == "meek"
    await asyncio.gather(*greedy, return_exceptions=True)
    assert len(jobs.begun) == 2 * FILE_THREADS
    assert not threads._shares
    threads.close()
