"""Log-probabilities of prompts and embeddings through the dispatcher: each once, whatever becomes of the replicas."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.errors import ApiError
from cluster.wire.replica_messages import PromptRow, Report
from engine.request import Request
from tests.cluster.cluster_lab import Lab, oracle, until
from tests.engine.engine_driver import Driver, request


def scored(name: str, **params) -> Request:
    return request(name, 40, **{"prompt_logprobs": 2, "temperature": 1.0, "seed": 3, "ignore_eos": True, **params})


async def collect(lab: Lab, asked: Request):
    """Return what came of the prompt, of its embedding, and the tokens by choice; the prompt comes first."""
    told, embeddings, tokens = [], [], {}
    async for chunk in lab.dispatcher.generate(asked):
        assert not (chunk.prompt_logprobs and any(tokens.values())), "the prompt is told before the first token"
        told += chunk.prompt_logprobs
        embeddings += [chunk.embedding] if chunk.embedding is not None else []
        tokens.setdefault(chunk.choice, []).extend(chunk.token_ids)
    return told, embeddings, tokens


def undisturbed(asked: Request):
    driver, told, pooled = Driver(num_blocks=200), [], []
    driver.core.add(asked)
    while driver.core.has_unfinished:
        report = driver.step()
        told += [entry for part in report.prompt_logprobs for entry in part.logprobs]
        pooled += [tuple(state.tolist()) for _, state in report.pooled]
    return told, pooled


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("phase", range(5))
async def test_each_prompt_token_is_told_once_over_a_kill(phase, n):
    asked = scored("r", n=n)
    async with Lab(seed=phase) as lab:
        await lab.start("a", steps=phase)
        running = asyncio.create_task(collect(lab, asked))
        await until(lambda: lab.dispatcher.counters.reports >= phase)
        await lab.start("b")
        lab.kill("a")
        told, _, tokens = await running
    assert told == undisturbed(asked)[0]
    assert len(told) == 39
    assert tokens == oracle(asked)


async def test_no_choice_runs_ahead_of_its_prompt_where_a_cache_has_that():
    asked = scored("r", n=3)
    async with Lab(long_prefill_token_threshold=8) as lab:
        await lab.start("a", steps=1)
        running = asyncio.create_task(collect(lab, asked))
        await until(lambda: lab.dispatcher.counters.reports >= 1)
        await lab.start("b")
        await lab.collect(request("warm", 40))
        lab.kill("a")
        told, _, tokens = await running
    assert told == undisturbed(asked)[0]
    assert tokens == oracle(asked)


@pytest.mark.parametrize("pooling", ["last", "mean"])
async def test_an_embedding_comes_once_over_a_kill(pooling):
    asked = replace(request("e", 40), pooling=pooling)
    async with Lab() as lab:
        await lab.start("a", steps=1)
        running = asyncio.create_task(collect(lab, asked))
        await until(lambda: lab.alive["a"].executor.executed == 1)
        await lab.start("b")
        lab.kill("a")
        told, embeddings, tokens = await running
        assert lab.dispatcher.counters.outcomes == {"completed": 1}
    assert (told, tokens) == ([], {0: []})
    assert embeddings == [pytest.approx(undisturbed(asked)[1][0])]


async def test_what_is_told_of_a_prompt_at_the_wrong_place_ends_the_request_with_an_error():
    async with Lab() as lab:
        replica = await lab.start("a", steps=1)
        running = asyncio.create_task(collect(lab, scored("r")))
        await until(lambda: lab.dispatcher.counters.reports == 1)
        heard = [message for message in replica.links[0].heard if isinstance(message, Report)]
        row = heard[0].prompts[0]
        wrong = PromptRow(row.stream, 30, [-1.0], [[1, 2]], [[-1.0, -2.0]], [1])
        late = Report(1, heard[0].incarnation, 2, [], [], [], heard[0].load, prompts=[wrong])
        replica.links[0].inject(late)
        with pytest.raises(Exception, match="could not be completed"):
            await running


async def test_rules_that_leave_no_token_are_the_clients_error_and_nobody_elses():
    async with Lab() as lab:
        await lab.start("a")
        bad = request("bad", 5, allowed_token_ids=(5,), bad_words=("five",), bad_words_ids=((5,),))
        by = asyncio.create_task(lab.collect(request("by", 9)))
        with pytest.raises(ApiError, match="leave no token") as caught:
            await lab.collect(bad)
        assert (caught.value.status, caught.value.code, caught.value.retryable) == (400, "no_token_left", False)
        assert await by == oracle(request("by", 9))
