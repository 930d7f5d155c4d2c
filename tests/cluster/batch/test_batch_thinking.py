"""Rows with a bound on thinking: answered as by HTTP, and the same whichever driver ends them."""

import asyncio
import json
from contextlib import closing

import pytest

from cluster.batch.rows import CHAT
from cluster.openai.parsers.reasoning import DeepSeekR1Parser
from tests import tiny_tokenizer
from tests.cluster.batch.batch_lab import BatchLab, cut_off
from tests.cluster.cluster_lab import Lab, until
from tests.openai_app import app_for, client_for, served_model

TOKENS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_tokenizer.save(tiny_tokenizer.byte_level(), tmp_path_factory.mktemp("model"))
    return served_model(folder, "tiny", max_model_len=128, reasoning_parser=DeepSeekR1Parser)


@pytest.fixture(autouse=True)
def _whole_vocabulary(model, monkeypatch):
    monkeypatch.setattr("tests.cluster.cluster_lab.VOCAB", model.vocab_size)


def rows(budgets):
    chat = [{"role": "user", "content": "hi"}]
    same = {"model": "tiny", "messages": chat, "max_tokens": TOKENS, "ignore_eos": True, "seed": 3}
    return [same | {"thinking_token_budget": budget} for budget in budgets]


async def answers(folder, model, bodies, lab):
    found = await BatchLab(folder, model, bodies, url=CHAT).results(lab)
    assert [one.status for one in found] == [200] * len(bodies), found
    return [json.loads(one.body) for one in found]


async def test_a_row_is_answered_as_by_http(model, tmp_path):
    bodies = rows([5, 12, TOKENS + 1])
    async with Lab() as lab:
        await lab.start("a")
        found = await answers(tmp_path / "rows", model, bodies, lab)
        async with client_for(app_for(lab.dispatcher, model)) as client:
            asked = [(await client.post("/v1/chat/completions", json=body)).json() for body in bodies]
    for body, row, answer in zip(bodies, found, asked, strict=True):
        assert row["choices"] == answer["choices"]
        assert row["usage"]["completion_tokens"] == TOKENS
        if body["thinking_token_budget"] < TOKENS:
            assert row["choices"][0]["message"]["content"]


async def test_the_next_driver_comes_to_the_same(model, tmp_path):
    bodies = rows(range(4, 16))
    async with Lab() as lab:
        await lab.start("a")
        undisturbed = await answers(tmp_path / "quiet", model, bodies, lab)
    batch = BatchLab(tmp_path / "killed", model, bodies, url=CHAT)
    async with Lab() as lab:
        await lab.start("a", pace=0.002)
        with closing(batch.open()) as ledger:
            work = asyncio.create_task(batch.run(lab, ledger))
            await until(lambda: lab.dispatcher.counters.tokens >= 200)
            assert not work.done()
            await cut_off(work)
    async with Lab() as lab:
        await lab.start("b")
        found = [json.loads(one.body) for one in await batch.results(lab)]
    assert [one["choices"] for one in found] == [one["choices"] for one in undisturbed]
