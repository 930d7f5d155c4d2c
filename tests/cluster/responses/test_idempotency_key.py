"""A repeated key joins the answer of the first request, or goes on with its stream."""

import asyncio
import json

import pytest

from cluster.answer_log import AnswerLog
from cluster.errors import ApiError
from cluster.responses.copies import NoCopies
from tests.cluster.ingress.test_answers_made_again import GoingOn
from tests.openai_app import MODEL, app_for, client_for, saying, served_model

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
TEXT = {"model": MODEL, "prompt": "hi", "stream": True}
REPLY = {"model": MODEL, "input": "hi", "stream": True}
PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT, "/v1/responses": REPLY}
KEY = {"idempotency-key": "one"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"), max_model_len=4096)


def after(text, number):
    """The frames behind an event."""
    return text.partition(f"id: {number}\n")[2].partition("\n\n")[2]


def failing_for_now(model):
    """A source that says a part of "hello world" and then fails; without `hold` it says the rest."""
    tokens = [*model.tokenizer.encode("hello world"), model.tokenizer.eos_token_id]
    failure = ApiError("replica_lost", "lost")
    return GoingOn(lambda *_: tokens, eos=tokens[-1], hold=4, error=failure)


@pytest.mark.parametrize("path", PATHS)
async def test_a_repeated_key_joins_the_running_answer(model, path):
    source = saying(model, "hello world", hold=4)
    async with client_for(app_for(source, model)) as client:
        posts = [asyncio.create_task(client.post(path, json=PATHS[path], headers=KEY)) for _ in range(3)]
        while not source.requests:
            await asyncio.sleep(0)
        source.go.set()
        answers = [await post for post in posts]
        later = await client.post(path, json=PATHS[path], headers=KEY)
    assert {one.text for one in answers} == {later.text}
    assert len(source.requests) == 1


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_goes_on_behind_the_last_event(model, path):
    async with client_for(app_for(saying(model, "hello world"), model)) as client:
        whole = (await client.post(path, json=PATHS[path], headers=KEY)).text
        for number in (0, 3, whole.count("id: ") - 1):
            rest = await client.post(path, json=PATHS[path], headers=KEY | {"last-event-id": str(number)})
            assert rest.text == after(whole, number)


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_that_nobody_knows_any_more_is_computed_again(model, path):
    """The client has the beginning from a server of which nothing is left."""
    answers = []
    for chunk in (1, 3):  # the same tokens in other pieces
        source = saying(model, "hello world", chunk=chunk)
        async with client_for(app_for(source, model)) as client:
            headers = KEY | ({"last-event-id": "5"} if chunk == 3 else {})
            answers.append((await client.post(path, json=PATHS[path] | {"temperature": 1.0}, headers=headers)).text)
        answers.append(source.requests[0].seed)
    whole, seed, rest, seed_again = answers
    assert seed == seed_again
    deltas = [line for line in after(whole, 5).splitlines() if line.startswith("id:")]
    assert [line for line in rest.splitlines() if line.startswith("id:")] == deltas


async def test_the_seed_of_the_client_counts(model):
    source = saying(model, "hello")
    async with client_for(app_for(source, model)) as client:
        await client.post("/v1/chat/completions", json=CHAT | {"seed": 7}, headers=KEY)
    assert source.requests[0].seed == 7


async def test_a_whole_answer_is_given_again(model):
    source = saying(model, "hello")
    async with client_for(app_for(source, model)) as client:
        body = CHAT | {"stream": False}
        first = await client.post("/v1/chat/completions", json=body, headers=KEY)
        assert first.json()["choices"][0]["message"]["content"] == "hello"
        again = await client.post("/v1/chat/completions", json=body, headers=KEY)
    assert again.content == first.content
    assert len(source.requests) == 1


async def test_another_body_is_refused(model):
    async with client_for(app_for(saying(model, "hello"), model)) as client:
        await client.post("/v1/chat/completions", json=CHAT, headers=KEY)
        answer = await client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 3}, headers=KEY)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("idempotency_key_reused", "Idempotency-Key")


async def test_another_body_is_refused_where_the_answer_failed_for_now(model):
    source = failing_for_now(model)
    async with client_for(app_for(source, model)) as client:
        await client.post("/v1/chat/completions", json=CHAT, headers=KEY)
        source.hold = None
        answer = await client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 3}, headers=KEY)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "idempotency_key_reused"
        same = await client.post("/v1/chat/completions", json=CHAT, headers=KEY)
        assert same.text.endswith("data: [DONE]\n\n")


async def test_a_refused_request_leaves_its_key_free(model):
    async with client_for(app_for(saying(model, "hello"), model)) as client:
        wrong = await client.post("/v1/chat/completions", json=CHAT | {"top_p": 7}, headers=KEY)
        assert wrong.status_code == 400
        right = await client.post("/v1/chat/completions", json=CHAT, headers=KEY)
        assert right.status_code == 200


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"last-event-id": "3"}, "Last-Event-ID"),
        (KEY | {"last-event-id": "x"}, "Last-Event-ID"),
        ({"idempotency-key": ""}, "Idempotency-Key"),
        ({"idempotency-key": "x" * 300}, "Idempotency-Key"),
    ],
)
async def test_wrong_headers_are_refused_by_name(model, headers, param):
    async with client_for(app_for(saying(model, "hello"), model)) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


async def test_where_nothing_is_kept_a_key_is_refused(model):
    async with client_for(app_for(saying(model, "hello"), model, response_retention=0)) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT, headers=KEY)
        assert answer.status_code == 400
        assert "--response-retention" in answer.json()["error"]["message"]


async def test_an_answer_that_failed_for_now_is_gone_on_with_by_the_next_request(model):
    source = failing_for_now(model)
    async with client_for(app_for(source, model)) as client:
        first = (await client.post("/v1/chat/completions", json=CHAT, headers=KEY)).text
        assert '"code":"replica_lost"' in first
        source.hold = None
        again = (await client.post("/v1/chat/completions", json=CHAT, headers=KEY)).text
    had = first.rpartition("id: ")[0]
    assert again.startswith(had)
    assert again.endswith("data: [DONE]\n\n")
    said = [json.loads(line.removeprefix("data: ")) for line in again.splitlines() if line.startswith("data: {")]
    assert "".join([one["choices"][0]["delta"].get("content", "") for one in said]) == "hello world"


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_of_events_misses_nothing_of_an_answer_that_failed_for_now(model, path):
    """It says the last id that came, whatever event had it."""
    source = failing_for_now(model)
    async with client_for(app_for(source, model)) as client:
        first = (await client.post(path, json=PATHS[path], headers=KEY)).text
        assert '"code":"replica_lost"' in first
        last = first.rpartition("id: ")[2].partition("\n")[0]
        source.hold = None
        rest = (await client.post(path, json=PATHS[path], headers=KEY | {"last-event-id": last})).text
        whole = (await client.post(path, json=PATHS[path], headers=KEY)).text
    had = first[: first.rindex("id: ")] + "id: " + first.rpartition("id: ")[2].partition("\n\n")[0] + "\n\n"
    assert had + rest == whole


async def test_a_stream_is_gone_on_with_when_its_previous_response_is_gone(model):
    source = saying(model, "hello world")
    async with client_for(app_for(source, model)) as client:
        previous = (await client.post("/v1/responses", json=REPLY | {"stream": False, "store": True})).json()["id"]
        body = REPLY | {"previous_response_id": previous}
        whole = (await client.post("/v1/responses", json=body, headers=KEY)).text
        assert (await client.delete(f"/v1/responses/{previous}")).status_code == 200
        rest = await client.post("/v1/responses", json=body, headers=KEY | {"last-event-id": "3"})
        assert rest.text == after(whole, 3)
        other = await client.post("/v1/responses", json=body, headers={"idempotency-key": "two"})
        assert other.status_code == 400
    assert len(source.requests) == 2


async def test_a_chat_that_nobody_wants_any_more_is_ended_and_its_key_free(model):
    source = saying(model, "hello world", hold=3)
    async with client_for(app_for(source, model)) as client:
        reading = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT, headers=KEY))
        while not source.requests:
            await asyncio.sleep(0)
        name = source.requests[0].request_id
        gone = await client.delete(f"/v1/chat/completions/{name}")
        assert gone.json() == {"object": "chat.completion.deleted", "id": name, "deleted": True}
        await reading
        assert source.closed == [name]
        again = await client.delete(f"/v1/chat/completions/{name}")
        assert again.status_code == 404
        assert again.json()["error"]["param"] == "completion_id"
        source.go.set()
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=KEY)).text.endswith("[DONE]\n\n")


@pytest.mark.parametrize("name", ["chatcmpl-1", "resp_1", "x" * 200])
async def test_a_chat_that_is_not_kept_is_not_found(model, name):
    async with client_for(app_for(saying(model, "hello"), model)) as client:
        answer = await client.delete(f"/v1/chat/completions/{name}")
        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == "completion_id"


class Noted(NoCopies):
    """Knows what there is of an answer that could be copied."""

    def put(self, record):
        self.tokens = sum(len(chunk.token_ids) for _, chunk in AnswerLog(record.notes).past)


@pytest.mark.parametrize("path", PATHS)
async def test_tokens_of_a_whole_answer_are_copied_before_it_is_whole(model, path):
    source, copies = saying(model, "hello world", hold=3), Noted()
    async with client_for(app_for(source, model, copies=copies)) as client:
        waiting = asyncio.create_task(client.post(path, json=PATHS[path] | {"stream": False}, headers=KEY))
        while not source.requests or copies.tokens < 3:
            await asyncio.sleep(0.001)
        source.go.set()
        assert (await waiting).status_code == 200
