"""A batch on fake replicas: each row once and exact, whatever is killed, full replicas, and limits that hold."""

import asyncio
import json
import random
from collections import Counter
from contextlib import closing
from dataclasses import replace

import msgspec
import pytest

from cluster.batch import row_requests
from cluster.batch.errors import BatchError, FencedError, LedgerError
from cluster.batch.row_requests import Preparer
from cluster.batch.rows import COMPLETIONS, Task
from cluster.errors import ApiError
from cluster.router.dispatcher import Dispatcher
from cluster.router.dispatcher_config import DispatcherConfig
from cluster.router.token_log import TokenLog
from deploy.batch.progress import first_failures
from engine.text.tokenizer import Tokenizer
from tests import tiny_tokenizer
from tests.cluster.batch.batch_lab import CREATED, BatchLab, cut_off
from tests.cluster.cluster_lab import Lab, until
from tests.engine.engine_driver import VOCAB, request
from tests.openai_app import served_model

PATIENT = DispatcherConfig(admission_wait=60.0, no_replica_timeout=60.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_tokenizer.save(tiny_tokenizer.byte_level(), tmp_path_factory.mktemp("model"))
    return served_model(folder, "tiny", vocab_size=VOCAB, max_model_len=128)


def prompts(count, seed=1, **more):
    """Rows of all kinds that complete: greedy and drawn, short and long, one choice and several."""
    rng = random.Random(seed)
    kinds = [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 1.0, "n": 3}, {"temperature": 1.0, "seed": 5}]
    return [
        {
            "model": "tiny",
            "prompt": [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 30))],
            "max_tokens": rng.randrange(1, 40),
            "ignore_eos": True,
            **kinds[i % 4],
            **more,
        }
        for i in range(count)
    ]


def bodies_of(results):
    return [json.loads(one.body) for one in results]


async def test_every_row_is_answered_as_by_http_and_two_runs_give_the_same_bytes(model, tmp_path):
    bodies = prompts(60)
    async with Lab() as lab:
        await lab.start("a")
        first = await BatchLab(tmp_path / "1", model, bodies).results(lab)
        second = await BatchLab(tmp_path / "2", model, bodies).results(lab)
    assert [one.body for one in first] == [one.body for one in second]
    assert [one.status for one in first] == [200] * 60
    answers = bodies_of(first)
    assert len({answer["id"] for answer in answers}) == 60
    for body, answer in zip(bodies, answers, strict=True):
        assert answer["object"] == "text_completion"
        assert answer["created"] == CREATED
        assert len(answer["choices"]) == body.get("n", 1)
        assert answer["usage"]["completion_tokens"] == body.get("n", 1) * body["max_tokens"]
        assert "prompt_tokens_details" not in answer["usage"]


async def test_equal_rows_without_a_seed_draw_apart(model, tmp_path):
    bodies = [{"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 12, "temperature": 1.0}] * 8
    async with Lab() as lab:
        await lab.start("a")
        results = await BatchLab(tmp_path / "l", model, bodies).results(lab)
    assert len({answer["choices"][0]["text"] for answer in bodies_of(results)}) == 8


async def test_a_bad_row_is_one_error_and_harms_no_other(model, tmp_path):
    bodies = prompts(6)
    bodies[2] = {"model": "tiny", "prompt": [3], "max_tokens": 0}
    bodies[3] = {"model": "other", "prompt": [3]}
    bodies[4] = {"model": "tiny", "prompt": [3], "max_tokens": 5, "frequence_penalty": 1}
    async with Lab() as lab:
        await lab.start("a")
        results = await BatchLab(tmp_path / "l", model, bodies).results(lab)
    assert [one.status for one in results] == [200, 200, 400, 404, 400, 200]
    told = [json.loads(one.body)["error"] for one in results[2:5]]
    assert [error["param"] for error in told] == ["max_tokens", "model", "frequence_penalty"]
    assert "did you mean frequency_penalty?" in told[2]["message"]
    assert [one.code for one in results[2:5]] == [error["code"] for error in told]


async def drawn_by(lab, work, tokens):
    """Wait until so many tokens were drawn, or the work is done."""
    await until(lambda: lab.dispatcher.counters.tokens >= tokens or work.done())


@pytest.mark.parametrize("seed", range(4))
async def test_killed_drivers_and_replicas_change_no_byte(model, tmp_path, seed):
    """Drivers die between any two ticks, replicas at any time; of what a driver wrote down nothing runs twice."""
    bodies = prompts(40, seed)
    async with Lab() as lab:
        await lab.start("quiet")
        undisturbed = await BatchLab(tmp_path / "quiet", model, bodies).results(lab)
    rng = random.Random(seed)
    batch = BatchLab(tmp_path / "killed", model, bodies)
    lives = 0
    drawn = 0
    while True:
        async with Lab(PATIENT, seed) as lab:
            replicas = [await lab.start(f"{lives}-{i}", pace=0.002) for i in range(2)]
            ledger = batch.open()
            work = asyncio.create_task(batch.run(lab, ledger))
            await drawn_by(lab, work, rng.randrange(50, 400))
            if lives % 2 and not work.done():
                lab.kill(replicas[0].name)
                await lab.start(f"{lives}-again")
                await drawn_by(lab, work, lab.dispatcher.counters.tokens + 50)
            drawn += lab.dispatcher.counters.tokens
            if work.done():
                work.result()
                results = list(ledger.results())
                ledger.close()
                break
            await cut_off(work)
            ledger.close()
            lives += 1
    assert lives >= 2
    assert results == undisturbed
    wanted = sum(body["max_tokens"] * body.get("n", 1) for body in bodies)
    assert drawn < wanted + lives * 60  # what came since the last tick, of the rows that ran


async def test_a_row_goes_on_in_the_middle(model, tmp_path):
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 60, "temperature": 1.0, "n": 2, "ignore_eos": True}
    async with Lab() as lab:
        await lab.start("a")
        undisturbed = await BatchLab(tmp_path / "quiet", model, [body]).results(lab)
    batch = BatchLab(tmp_path / "l", model, [body])
    async with Lab() as lab:
        await lab.start("a", steps=20)
        ledger = batch.open()
        work = asyncio.create_task(batch.run(lab, ledger))
        await until(lambda: sum(len(one.tokens) for one in ledger.partial.get(0, {}).values()) == 40)
        await asyncio.sleep(0.01)
        await cut_off(work)
        ledger.close()
    async with Lab() as lab:
        await lab.start("b")
        assert await batch.results(lab) == undisturbed
        assert lab.dispatcher.counters.tokens == 80


async def test_a_stop_string_ends_a_resumed_row_where_it_ended_before(model, tmp_path):
    tokenizer = model.tokenizer
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 60, "temperature": 1.0, "ignore_eos": True}
    async with Lab() as lab:
        await lab.start("a")
        [plain] = await BatchLab(tmp_path / "plain", model, [body]).results(lab)
        text = json.loads(plain.body)["choices"][0]["text"]
        ids = tokenizer.encode(text)
        stop = text[len(text) // 2 : len(text) // 2 + 4]
        stopped = {**body, "stop": stop}
        undisturbed = await BatchLab(tmp_path / "quiet", model, [stopped]).results(lab)
    assert ids and bodies_of(undisturbed)[0]["choices"][0]["text"] == text[: text.index(stop)]
    batch = BatchLab(tmp_path / "l", model, [stopped])
    async with Lab() as lab:
        await lab.start("a", steps=10)
        ledger = batch.open()
        work = asyncio.create_task(batch.run(lab, ledger))
        await until(lambda: ledger.partial.get(0) is not None)
        await cut_off(work)
        ledger.flush()
        ledger.close()
    async with Lab() as lab:
        await lab.start("b")
        assert await batch.results(lab) == undisturbed


async def test_stop_strings_of_several_choices_end_them_alike_after_a_kill(model, tmp_path):
    """Some choices have ended by their text when the driver dies, and others have not."""
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 60, "temperature": 1.0, "n": 3, "ignore_eos": True}
    async with Lab() as lab:
        await lab.start("a")
        [plain] = await BatchLab(tmp_path / "plain", model, [body]).results(lab)
        text = json.loads(plain.body)["choices"][0]["text"]
        bodies = [{**body, "seed": i, "stop": [text[3], text[9:11]]} for i in range(8)]
        undisturbed = await BatchLab(tmp_path / "quiet", model, bodies).results(lab)
    batch = BatchLab(tmp_path / "l", model, bodies)
    for steps in (3, 6, 9):
        async with Lab(PATIENT) as lab:
            replica = await lab.start("a", steps=steps)
            ledger = batch.open()
            work = asyncio.create_task(batch.run(lab, ledger))
            await until(lambda r=replica, n=steps, w=work: r.executor.executed >= n or w.done())
            await asyncio.sleep(0.05)  # several ticks
            await cut_off(work)
            ledger.close()
    async with Lab() as lab:
        await lab.start("b")
        assert await batch.results(lab) == undisturbed


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"logprobs": 2}, True),
        ({"logprobs": 1, "n": 3, "temperature": 1.0}, True),
        ({"n": 3, "temperature": 1.0}, True),
        ({"logprobs": 2, "echo": True}, False),
        ({"prompt_logprobs": 1}, False),
    ],
    ids=["logprobs", "of several choices", "none", "echo", "of the prompt"],
)
async def test_log_probabilities_are_whole_after_kills(model, tmp_path, fields, kept):
    """Those of output tokens are kept with them; a row that tells of its prompt begins anew."""
    body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 60, "temperature": 0, "ignore_eos": True, **fields}
    async with Lab() as lab:
        await lab.start("a")
        undisturbed = await BatchLab(tmp_path / "quiet", model, [body] * 4).results(lab)
        most = lab.dispatcher.counters.tokens
    batch, drawn = BatchLab(tmp_path / "l", model, [body] * 4), 0
    for steps in (5, 10, 30):
        async with Lab() as lab:
            replica = await lab.start("a", steps=steps)
            with closing(batch.open()) as ledger:
                work = asyncio.create_task(batch.run(lab, ledger))
                await until(lambda r=replica, n=steps, w=work: r.executor.executed == n or w.done())
                await until(lambda lab=lab, before=ledger, w=work: before.partial or not kept or w.done())
                await cut_off(work)
                assert bool(ledger.partial) == kept
                drawn += lab.dispatcher.counters.tokens
    async with Lab() as lab:
        await lab.start("b")
        assert await batch.results(lab) == undisturbed
        drawn += lab.dispatcher.counters.tokens
    # The first tokens of choices may be on their way to where they are read.
    assert (most <= drawn <= most + 8) == kept
    told = json.loads(undisturbed[0].body)["choices"][0]
    assert len((told["logprobs"] or {"token_logprobs": range(60)})["token_logprobs"]) >= 60


async def test_the_replicas_are_kept_full_and_little_waits_in_them(model, tmp_path):
    bodies = [{"model": "tiny", "prompt": [i % 50 + 3], "max_tokens": 20, "ignore_eos": True} for i in range(200)]
    waiting = []
    async with Lab() as lab:
        replica = await lab.start("a", pace=0.004)
        batch = BatchLab(tmp_path / "l", model, bodies)
        ledger = batch.open()
        work = asyncio.create_task(batch.run(lab, ledger))
        while not work.done():
            waiting.append(lab.dispatcher.replicas()[0].load.num_waiting)
            await asyncio.sleep(0.001)
        work.result()
        ledger.close()
    assert max(waiting) <= 16
    full_steps = 200 * 20 / 16
    assert replica.executor.executed < 1.2 * full_steps


async def test_rows_with_one_beginning_run_together_and_find_it_cached(model, tmp_path):
    beginnings = [[20 + i] * 40 for i in range(10)]
    bodies = [
        {"model": "tiny", "prompt": [*beginnings[i % 10], i % 60 + 3], "max_tokens": 2, "ignore_eos": True}
        for i in range(100)
    ]
    cached = {}
    for lookahead in (1, 100):
        async with Lab(max_num_seqs=2) as lab:
            await lab.start("a", num_blocks=40)
            batch = BatchLab(tmp_path / f"{lookahead}", model, bodies, max_num_seqs=2)
            ledger = batch.open()
            await batch.run(lab, ledger, lookahead=lookahead)
            assert len(list(ledger.results())) == 100
            ledger.close()
            cached[lookahead] = lab.dispatcher.counters.cached_tokens
    assert cached[100] > 2 * cached[1]


@pytest.mark.parametrize("bound", ["WINDOW_BYTES", "WINDOW_TOKENS"])
async def test_few_rows_are_read_ahead_where_they_are_large(model, monkeypatch, bound):
    monkeypatch.setattr(row_requests, bound, 100)
    read = []

    async def rows():
        for number in range(200):
            read.append(number)
            task = Task(number, "", COMPLETIONS, {"model": "tiny", "prompt": [3 + number % 5] * 10})
            yield replace(Preparer(model, "job", 0, 1).prepare(task), num_bytes=10)

    async with row_requests.prefetched(rows(), 1024) as ready:
        most = 0
        async for row in row_requests.by_prefix(ready, 1024):
            await asyncio.sleep(0)
            most = max(most, len(read) - row.task.row)
    # Of a window, ahead of it, and one that finds no room.
    assert len(read) == 200 and most <= 10 + 10 + 1 + 1


async def test_rows_are_as_large_as_in_the_input_and_held_without_their_bodies(model, tmp_path, monkeypatch):
    held = []
    real = row_requests.by_prefix

    async def noting(rows, lookahead):
        async for row in real(rows, lookahead):
            held.append(row)
            yield row

    monkeypatch.setattr("cluster.batch.run.loop.by_prefix", noting)
    bodies = prompts(2)
    async with Lab() as lab:
        await lab.start("a")
        await BatchLab(tmp_path, model, bodies).results(lab)
    assert {row.task.row: row.num_bytes for row in held} == {i: len(msgspec.json.encode(bodies[i])) for i in range(2)}
    assert [row.task.body for row in held] == [{}, {}]


def test_a_row_without_a_seed_draws_by_that_of_the_batch_and_its_place(model):
    def seed(job="job", seed=1, row=0, **more):
        task = Task(row, "a", COMPLETIONS, {"model": "tiny", "prompt": [3, 5]})
        return Preparer(model, job, seed, 1, **more).prepare(task).call.seed

    assert seed() == seed(job="one row more at the end")
    assert len({seed(), seed(seed=2), seed(row=1), seed(lot="another batch")}) == 4


class Flaky:
    """Fails each request some times before it lets it through."""

    def __init__(self, source, times, error):
        self._source, self._times, self._error = source, times, error
        self.asked = Counter()

    async def generate(self, request, context=None):
        self.asked[request.request_id] += 1
        if self.asked[request.request_id] <= self._times:
            raise self._error
        async for chunk in self._source.generate(request):
            yield chunk

    def log_of(self, request_id):
        return self._source.log_of(request_id)

    def finish_choice(self, request_id, choice):
        self._source.finish_choice(request_id, choice)


async def test_what_may_be_over_is_tried_again_and_what_is_not_is_not(model, tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.batch.run.run_row.RETRY_PAUSE", 0.001)
    bodies = prompts(3)
    for error, times, asked, status in [
        (ApiError("replica_lost", "gone"), 2, 3, 200),
        (ApiError("replica_lost", "gone"), 9, 4, 503),
        (ApiError("request_quarantined", "no", status=500, retryable=False), 9, 1, 500),
        (RuntimeError("a bug"), 9, 1, 500),
    ]:
        async with Lab() as lab:
            await lab.start("a")
            flaky = Flaky(lab.dispatcher, times, error)
            batch = BatchLab(tmp_path / f"{status}-{asked}-{type(error).__name__}", model, bodies)
            ledger = batch.open()
            await batch.run(lab, ledger, flaky)
            assert [one.status for one in ledger.results()] == [status] * 3
            assert set(flaky.asked.values()) == {asked}
            ledger.close()


async def test_too_many_errors_stop_the_batch_and_resume_goes_on(model, tmp_path):
    bodies = prompts(30)
    for i in range(5, 10):
        bodies[i] = {"model": "tiny", "prompt": [3], "max_tokens": 0}
    batch = BatchLab(tmp_path / "l", model, bodies)
    async with Lab() as lab:
        await lab.start("a")
        ledger = batch.open()
        with pytest.raises(BatchError, match=r"5 rows failed, .*--max-errors 2; .* delete .*/l to begin"):
            await batch.run(lab, ledger, max_errors=2)
        ledger.close()
        ledger = batch.open()
        assert first_failures(batch.source, ledger.totals) == [
            f"rows:{row}: max_tokens must be between 1 and 2147483647, not 0" for row in (6, 7, 8)
        ]
        await batch.run(lab, ledger, max_errors=5)
        assert ledger.totals.num_errors == 5
        assert len(list(ledger.results())) == 30
        ledger.close()


async def test_errors_of_the_last_rows_count_too(model, tmp_path):
    bodies = [{"model": "tiny", "prompt": [3], "max_tokens": 0}] * 10
    async with Lab() as lab:
        await lab.start("a")
        ledger = BatchLab(tmp_path / "l", model, bodies).open()
        with pytest.raises(BatchError, match="10 rows failed, more than --max-errors 0"):
            await BatchLab(tmp_path / "l", model, bodies).run(lab, ledger, max_errors=0)
        ledger.close()


@pytest.mark.parametrize("max_tokens", [10, None])
async def test_a_bound_of_cost_lets_rows_run_that_may_fit(model, tmp_path, max_tokens):
    """What rows are likely to take stops nobody: they wait for what others really took."""
    more = {} if max_tokens is None else {"max_tokens": max_tokens}
    bodies = [
        {"model": "tiny", "prompt": [i % 50 + 3], "stop_token_ids": [*range(VOCAB)], **more} for i in range(150)
    ]
    async with Lab() as lab:
        await lab.start("a")
        ledger = BatchLab(tmp_path / "l", model, bodies).open()
        with pytest.raises(BatchError, match="--max-cost-tokens 200"):
            await BatchLab(tmp_path / "l", model, bodies).run(lab, ledger, max_cost_tokens=200)
        most = 1 + (max_tokens or 127)
        spent = ledger.totals.prompt_tokens + ledger.totals.output_tokens
        assert 200 - most < spent + 2 and spent <= 200
        assert spent == 2 * ledger.done.count
        ledger.close()


async def test_tokens_of_one_model_are_never_continued_by_another(model, tmp_path):
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 60, "ignore_eos": True}
    batch = BatchLab(tmp_path / "l", model, [body] * 4)
    async with Lab(PATIENT) as lab:
        await lab.start("old", steps=10, fingerprint="old")
        ledger = batch.open()
        ledger.agree_on("old")
        work = asyncio.create_task(batch.run(lab, ledger))
        await until(lambda: lab.dispatcher.counters.tokens >= 16)
        await lab.start("new", fingerprint="new")
        lab.kill("old")
        with pytest.raises(BatchError, match="replicas were replaced"):
            await work
        assert ledger.done.count == 0
        ledger.close()


def test_a_ledger_keeps_to_the_model_of_its_first_replicas(model, tmp_path):
    ledger = BatchLab(tmp_path / "l", model, [{}]).open()
    ledger.agree_on("one")
    ledger.agree_on("one")
    with pytest.raises(LedgerError, match="of another model than the replicas run now"):
        ledger.agree_on("other")
    ledger.close()
    with closing(BatchLab(tmp_path / "l", model, [{}]).open()) as next_one:
        assert next_one.replicas == "one"


async def test_the_cost_stays_below_its_limit(model, tmp_path):
    bodies = [{"model": "tiny", "prompt": [3] * 10, "max_tokens": 10, "ignore_eos": True} for _ in range(50)]
    batch = BatchLab(tmp_path / "l", model, bodies)
    async with Lab() as lab:
        await lab.start("a")
        ledger = batch.open()
        with pytest.raises(BatchError, match="--max-cost-tokens 300"):
            await batch.run(lab, ledger, max_cost_tokens=300)
        spent = ledger.totals.prompt_tokens + ledger.totals.output_tokens
        assert spent == 300 == 20 * ledger.done.count
        ledger.close()


async def test_a_batch_makes_room_for_clients_and_loses_no_token_by_it(model, tmp_path):
    bodies = [
        {"model": "tiny", "prompt": [i % 50 + 3], "max_tokens": 60, "temperature": 1.0, "ignore_eos": True}
        for i in range(48)
    ]
    async with Lab() as lab:
        await lab.start("a")
        undisturbed = await BatchLab(tmp_path / "quiet", model, bodies).results(lab)
    batch = BatchLab(tmp_path / "l", model, bodies)
    async with Lab() as lab:
        replica = await lab.start("a", pace=0.002)
        ledger = batch.open()
        work = asyncio.create_task(batch.run(lab, ledger, share=0.25))
        await until(lambda: lab.dispatcher.num_live > 16)
        clients = Dispatcher(rng=random.Random(1))
        clients.add_link(await replica.link("clients"))
        for number in range(3):
            seen = []
            async for _ in clients.generate(request(f"client-{number}", 3, max_tokens=40, ignore_eos=True)):
                seen.append(lab.dispatcher.num_live)
            assert seen[-1] <= 5  # a quarter of 16, and what is ahead
        await until(lambda: lab.dispatcher.num_live > 16 or work.done())
        await work
        assert list(ledger.results()) == undisturbed
        assert lab.dispatcher.counters.tokens == 48 * 60
        ledger.close()
        await clients.close()


async def test_first_tokens_that_come_as_their_row_is_stopped_are_kept(model, tmp_path, monkeypatch):
    wake = TokenLog.wake
    body = {"model": "tiny", "max_tokens": 60, "temperature": 1.0, "ignore_eos": True}
    batch = BatchLab(tmp_path / "l", model, [{**body, "prompt": [i + 3]} for i in range(4)])
    async with Lab() as lab:
        await lab.start("a", pace=0.002)
        with closing(batch.open()) as ledger:
            work = asyncio.create_task(batch.run(lab, ledger))

            def wake_and_stop(log):
                wake(log)
                work.cancel()

            monkeypatch.setattr(TokenLog, "wake", wake_and_stop)
            await asyncio.gather(work, return_exceptions=True)
            kept = [len(choice.tokens) for row in ledger.partial.values() for choice in row.values()]
            assert sum(kept) == lab.dispatcher.counters.tokens > 0


async def test_rows_that_end_by_their_text_do_not_look_like_clients(model, tmp_path):
    """What was ended from here is in the replica's figures for a step or two more."""
    body = {"model": "tiny", "max_tokens": 60, "temperature": 1.0, "ignore_eos": True}
    async with Lab() as lab:
        await lab.start("a")
        plain = BatchLab(tmp_path / "plain", model, [{**body, "prompt": [i + 3]} for i in range(40)])
        texts = [json.loads(one.body)["choices"][0]["text"] for one in await plain.results(lab)]
    bodies = [{**body, "prompt": [i + 3], "stop": [text[i % 20 + 2 : i % 20 + 5]]} for i, text in enumerate(texts)]
    async with Lab() as lab:
        await lab.start("a", pace=0.01)
        batch = BatchLab(tmp_path / "l", model, bodies)
        ledger = batch.open()
        await batch.run(lab, ledger, share=0.25)
        assert lab.dispatcher.counters.outcomes["completed"] + lab.dispatcher.counters.outcomes["aborted"] == 40
        ledger.close()


async def test_a_driver_that_was_fenced_stops_at_once(model, tmp_path):
    bodies = prompts(40)
    batch = BatchLab(tmp_path / "l", model, bodies)
    async with Lab() as lab:
        await lab.start("a", pace=0.01)
        ledger = batch.open()
        work = asyncio.create_task(batch.run(lab, ledger))
        await until(lambda: lab.dispatcher.num_live > 0)
        (tmp_path / "l" / "epoch-00000002").write_bytes(b"")
        with pytest.raises(FencedError):
            await work
        await until(lambda: lab.dispatcher.num_live == 0)
        ledger.close()


async def test_no_replica_for_a_while_costs_time_and_nothing_else(model, tmp_path):
    bodies = prompts(20)
    async with Lab(PATIENT) as lab:
        batch = BatchLab(tmp_path / "l", model, bodies)
        ledger = batch.open()
        work = asyncio.create_task(batch.run(lab, ledger))
        await until(lambda: lab.dispatcher.num_live > 0)
        await lab.start("late")
        await work
        assert [one.status for one in ledger.results()] == [200] * 20
        ledger.close()


def test_the_tokenizer_of_the_lab_knows_all_its_ids(model):
    assert isinstance(model.tokenizer, Tokenizer)
    assert model.tokenizer.vocab_size >= VOCAB


async def test_rows_are_each_of_one_arithmetic_and_what_is_done_stays(model, tmp_path):
    """After an update of Squadron or torch: the same weights round otherwise."""
    body = {"model": "tiny", "max_tokens": 60, "ignore_eos": True}
    batch = BatchLab(
        tmp_path / "l", model, [{**body, "prompt": [i + 5, 6], "max_tokens": 5 + 50 * i} for i in (0, 1)]
    )
    before, after = "weights.code.old", "weights.other code.new"
    async with Lab(PATIENT) as lab:
        await lab.start("old", steps=30, fingerprint=before)
        with closing(batch.open()) as ledger:
            ledger.agree_on(before)
            work = asyncio.create_task(batch.run(lab, ledger))
            await until(lambda: ledger.done.count == 1 and lab.dispatcher.counters.tokens >= 25)
            await lab.start("new", fingerprint=after)
            lab.kill("old")
            with pytest.raises(BatchError, match="replicas were replaced"):
                await work
            assert list(ledger.partial) == [1]
    with closing(batch.open()) as ledger:
        ledger.agree_on(after)
    with closing(batch.open()) as ledger:  # killed at once: it is not forgotten that they are forgotten
        assert (ledger.replicas, ledger.done.count, dict(ledger.partial)) == (after, 1, {})
        async with Lab(PATIENT) as lab:
            await lab.start("new", fingerprint=after)
            await batch.run(lab, ledger)
            assert lab.dispatcher.counters.tokens == 55
        assert ledger.done.count == 2
        told = [json.loads(done.body)["system_fingerprint"] for done in ledger.results()]
        assert told == ["weights.code", "weights.other code"], "each row says what made it, not how that rounds"
