"""Log-probabilities of named tokens, and of the whole vocabulary where the server allows that."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.errors import ApiError
from cluster.openai.choices import PlacedLogprob
from cluster.openai.frames import chat_logprobs
from cluster.openai.validation import parse_chat, parse_completion
from cluster.router.logprob_room import LogprobRoom
from engine.errors import InvalidRequestError
from engine.report import TokenLogprob
from engine.sampling_params import MOST_LOGPROBS, SamplingParams
from tests.cluster.cluster_lab import Lab, until
from tests.engine.engine_driver import VOCAB, Driver, request
from tests.openai_app import app_for, client_for, served_model

MESSAGES = [{"role": "user", "content": "hi"}]


def test_named_tokens_are_told_in_their_order():
    driver = Driver(max_logprobs=20)
    driver.core.add(request("named", 5, max_tokens=4, logprob_token_ids=(9, 3, 9), ignore_eos=True))
    driver.core.add(request("best", 5, max_tokens=4, logprobs=2, ignore_eos=True))
    driver.drain()
    for entry in driver.logprobs["named", 0]:
        assert entry.logprob == -0.5
        assert entry.top == tuple((token, -0.5 - (token - entry.token_id) % VOCAB) for token in (9, 3, 9))
    assert [len(entry.top) for entry in driver.logprobs["best", 0]] == [2] * 4, "others' wishes change nothing"


@pytest.mark.parametrize(("wanted", "count"), [(-1, VOCAB), (30, 30)])
def test_more_than_the_usual_best_come_sorted(wanted, count):
    driver = Driver(max_logprobs=-1)
    driver.core.add(request("all", 5, max_tokens=2, logprobs=wanted, ignore_eos=True))
    driver.drain()
    for entry in driver.logprobs["all", 0]:
        assert [token for token, _ in entry.top] == [(entry.token_id + i) % VOCAB for i in range(count)]


def test_the_engine_refuses_more_than_it_is_configured_to_tell():
    driver = Driver(max_logprobs=30)
    driver.core.add(request("fits", 5, max_tokens=2, logprobs=30))
    for wanted in (31, -1):
        with pytest.raises(InvalidRequestError, match="at most 30"):
            driver.core.add(request("more", 5, max_tokens=2, logprobs=wanted))
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        driver.core.add(request("unknown", 5, max_tokens=2, logprob_token_ids=(VOCAB,)))


@pytest.mark.parametrize("count", [0, None, 2])
def test_names_go_with_as_many_logprobs_or_none(count):
    params = SamplingParams(logprobs=count, logprob_token_ids=(1, 2))
    assert params.logprobs == 0
    assert params.num_alternatives(100) == 2
    with pytest.raises(InvalidRequestError, match="must be 2"):
        SamplingParams(logprobs=5, logprob_token_ids=(1, 2))


@pytest.fixture
def model(tmp_path):
    return served_model(tmp_path, max_logprobs=-1, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("parse", "fields", "param"),
    [
        (parse_completion, {"prompt": "a", "logprobs": -2}, "logprobs"),
        (parse_completion, {"prompt": "a", "logprobs": 10**6}, "logprobs"),
        (parse_completion, {"prompt": "a", "logprobs": -1, "echo": True}, "logprobs"),
        (
            parse_completion,
            {"prompt": "a", "logprobs": 0, "logprob_token_ids": [1], "echo": True},
            "logprob_token_ids",
        ),
        (parse_completion, {"prompt": "a", "logprob_token_ids": list(range(129))}, "logprob_token_ids"),
        (parse_completion, {"prompt": "a", "logprobs": -1, "max_tokens": MOST_LOGPROBS, "n": 16}, "logprobs"),
        (parse_chat, {"messages": MESSAGES, "logprob_token_ids": [1]}, "logprob_token_ids"),
        (parse_chat, {"messages": MESSAGES, "top_logprobs": -1}, "top_logprobs"),
        (
            parse_chat,
            {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3, "logprob_token_ids": [1]},
            "top_logprobs",
        ),
        (parse_chat, {"messages": MESSAGES, "prompt_logprobs": -1}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(tmp_path, parse, fields, param):
    model = served_model(tmp_path, max_logprobs=-1, max_model_len=10**6)
    with pytest.raises(InvalidRequestError) as refused:
        parse({"model": "demo", **fields}, model)
    assert refused.value.param == param


def test_without_the_flag_all_are_refused_with_the_flag_named(tmp_path):
    model = served_model(tmp_path)
    with pytest.raises(InvalidRequestError, match="--max-logprobs") as refused:
        parse_completion({"model": "demo", "prompt": "a", "logprobs": -1}, model)
    assert "logprob_token_ids" in str(refused.value)
    parse_completion({"model": "demo", "prompt": "a", "logprob_token_ids": [1, 2]}, model)


async def test_answers_show_them_in_the_forms_that_clients_know(model):
    async with Lab(max_logprobs=-1) as lab:
        await lab.start("a")
        client = client_for(app_for(lab.dispatcher, model))
        body = {"model": "demo", "max_tokens": 2, "ignore_eos": True, "return_tokens_as_token_ids": True}
        prompt = {"prompt": [5, 6]}
        answer = await client.post("/v1/completions", json=body | prompt | {"logprob_token_ids": [9, 3]})
        assert answer.status_code == 200, answer.text
        told = answer.json()["choices"][0]["logprobs"]
        for chosen, shown in zip(told["tokens"], told["top_logprobs"], strict=True):
            assert set(shown) == {"token_id:9", "token_id:3", chosen}
        answer = await client.post("/v1/completions", json=body | prompt | {"logprobs": -1})
        assert len(answer.json()["choices"][0]["logprobs"]["top_logprobs"][0]) == VOCAB


def test_chats_show_all_that_came(model):
    call = parse_chat(
        {"model": "demo", "messages": MESSAGES, "max_tokens": 2, "logprobs": True, "logprob_token_ids": [9, 3]}, model
    )
    assert call.params.logprob_token_ids == (9, 3)
    entry = PlacedLogprob(TokenLogprob(5, -0.5, ((9, -4.5), (3, -9.0))), 0)
    (told,) = chat_logprobs([entry], model.tokenizer, call.params.num_told, as_ids=True)["content"]
    shown = {one["token"]: one["logprob"] for one in told["top_logprobs"]}
    assert shown == {"token_id:9": -4.5, "token_id:3": -9.0}
    call = parse_chat({"model": "demo", "messages": MESSAGES, "logprobs": True, "top_logprobs": -1}, model)
    assert call.params.logprobs == -1


async def test_so_many_run_at_a_time_as_routers_can_hold_and_those_who_leave_make_room():
    async with Lab(max_logprobs=-1, max_model_len=20_000) as lab:
        replica = await lab.start("a", steps=0, num_blocks=8192)
        most = MOST_LOGPROBS // VOCAB
        asks = [request(name, 5, max_tokens=most, logprobs=-1) for name in ("one", "two", "three")]
        runs = [asyncio.create_task(anext(lab.dispatcher.generate(ask))) for ask in asks]
        await until(lambda: lab.dispatcher.num_live == 1)
        await asyncio.sleep(0.05)
        assert lab.dispatcher.num_live == 1
        runs[1].cancel()
        runs[0].cancel()
        replica.executor.allow(100)  # some are of the first, until its replica hears that it was left
        assert (await runs[2]).logprobs


async def test_who_waits_for_room_does_so_until_its_deadline_and_in_order():
    room = LogprobRoom(most=10)
    now = asyncio.get_running_loop().time

    def ask(tokens: int, deadline: float | None = None):
        return room.of(replace(request("a", 5, max_tokens=tokens, logprobs=-1), deadline=deadline), 1)

    async with ask(8):
        async with ask(2):
            with pytest.raises(ApiError) as late:
                async with ask(1, deadline=now() + 0.02):
                    pass
        assert late.value.code == "deadline_exceeded"
        large = asyncio.create_task(ask(9).__aenter__())
        one = ask(1)
        small = asyncio.create_task(one.__aenter__())
        await asyncio.sleep(0.02)
        assert not small.done(), "it would pass one that came before"
        large.cancel()
        await small
        await one.__aexit__(None, None, None)
    async with ask(1000):
        pass  # more than there is room for has all of it
