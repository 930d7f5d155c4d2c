"""Answers of other routers are given out within bounds, and counted."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from starlette.types import Receive, Scope, Send

from cluster.admission.keys import OPEN
from cluster.admission.tenants import Tenancy
from cluster.answer_log import AnswerLog
from cluster.errors import ApiError
from cluster.responses import replays
from cluster.responses.copies import NoCopies
from cluster.responses.record import End, Head, Record
from cluster.responses.replays import Replays
from cluster.responses.view import AnswerView
from cluster.token_source import TokenChunk
from tests.cluster.ingress.router_lab import RouterLab
from tests.cluster.responses.test_router_deaths import begin, client_of, fetched, stream_of
from tests.openai_app import MODEL, app_for, client_for, saying, served_model


def figure(metrics: str, name: str) -> float:
    (line,) = [line for line in metrics.splitlines() if line.startswith(f"squadron_{name}{{")]
    return float(line.rpartition(" ")[2])


async def test_a_router_gives_out_so_many_answers_of_others_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(replays, "MOST", 2)
    async with RouterLab(tmp_path, pace=0.002) as lab:
        one, two = lab.routers
        names = [await begin(one, max_output_tokens=3000) for _ in range(2)]
        async with client_of(two) as client, client_of(one) as other:
            reading = asyncio.create_task(stream_of(two, names[0]))
            while "squadron_answer_replays_running{" not in (await client.get("/metrics")).text or not figure(
                (await client.get("/metrics")).text, "answer_replays_running"
            ):
                await asyncio.sleep(0.001)
            refused = await client.get(f"/v1/responses/{names[1]}?stream=true")
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "overloaded"
            assert int(refused.headers["retry-after"]) > 0
            metrics = (await client.get("/metrics")).text
            assert figure(metrics, "answer_replays_total") == 1
            assert figure(metrics, "answer_replays_refused_total") == 1
            assert (await other.get(f"/v1/responses/{names[1]}")).status_code == 200, "it is this router's own"
            for name in names:
                assert (await other.post(f"/v1/responses/{name}/cancel")).status_code == 200
            await reading
            assert (await fetched(two, names[1], "cancelled"))["id"] == names[1]
            assert figure((await client.get("/metrics")).text, "answer_replays_running") == 0


async def test_what_one_tenant_has_given_out_takes_none_of_anothers_share(monkeypatch):
    monkeypatch.setattr(replays, "MOST_BYTES", 40_000)

    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()

    maker: Any = SimpleNamespace(endpoints={"/v1/responses": endpoint}, spawn=asyncio.create_task)
    given = Replays(Tenancy(), NoCopies(), maker)

    def of(tenant: str) -> AbstractAsyncContextManager[AnswerView]:
        return given.of(Record(Head("resp_1", "/v1/responses", bytes(15_000), tenant, "1")))

    async with of("bob"), of("bob"), of("ann") as view:
        with pytest.raises(ApiError) as refused:
            async with of("bob"):
                pass
        assert refused.value.code == "overloaded" and "tenants share" in refused.value.message
        while not view.status:
            await view.changed()
        view.check()


async def test_a_copy_that_cannot_be_read_takes_no_place():
    given = Replays(Tenancy(), NoCopies(), SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(msgspec.MsgspecError):
        async with given.of(Record(Head("resp_1", "/v1/responses", b"{}", "bob", "1"), [b"of another version"])):
            pass
    assert (given.begun, given.num_running, given.num_bytes) == (0, 0, 0)


class Ended(NoCopies):
    """Copies of one long answer that has ended."""

    def __init__(self, model) -> None:
        log = AnswerLog()
        for token in model.tokenizer.encode("hello world " * 50):
            log.add(0, TokenChunk(0, (token,)))
        log.add(0, TokenChunk(0, (model.tokenizer.eos_token_id,), finish_reason="stop"))
        self.notes = [log.take() or b""]

    async def fetch(self, name: str, tenant: str | None) -> Record | None:
        body = b'{"model":"%s","input":"hi","background":true}' % MODEL.encode()
        return Record(Head(name, "/v1/responses", body, OPEN.name, "1", background=True), list(self.notes), End(0))


async def test_one_that_takes_too_much_ends_with_a_typed_error_and_can_be_gone_on_with(tmp_path, monkeypatch):
    model = served_model(tmp_path, max_model_len=4096)
    roomy = app_for(saying(model, "unused"), model, copies=Ended(model))
    monkeypatch.setattr(replays, "MOST_BYTES", 40_000)
    small = app_for(saying(model, "unused"), model, copies=Ended(model))
    path = "/v1/responses/resp_1?stream=true"
    async with client_for(roomy) as client, client_for(small) as other:
        whole = (await client.get(path)).text
        assert '"type":"response.completed"' in whole
        part = (await other.get(path)).text
        *had, last, empty = part.split("\n\n")
        assert (empty, '"code":"overloaded"' in last, "response.failed" in part) == ("", True, False)
        assert whole.startswith("\n\n".join(had))
        assert (await other.get("/v1/responses/resp_1")).status_code == 429
        rest = (await client.get(f"{path}&starting_after={len(had) - 1}")).text
        assert "\n\n".join(had) + "\n\n" + rest == whole
