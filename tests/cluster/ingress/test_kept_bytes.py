"""What a gateway keeps beside its routers: in few bytes, and no client's takes the room of another's."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.answer_log import CONTINUES, KEEPS, KEPT, AnswerLog
from cluster.ingress import exchange
from cluster.ingress.exchange import KeptBytes
from cluster.ingress.guard import RouterLossGuard
from cluster.ingress.packed_notes import PackedNotes
from cluster.ingress.router_side import IngressCheck
from cluster.token_source import TokenChunk

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
REST = {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}


def scope(key: bytes) -> dict:
    headers = [(b"authorization", b"Bearer " + key)]
    return {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "client": ("::1", 1)}


@given(st.lists(st.binary(max_size=9000), max_size=9))
def test_notes_come_back_as_they_were(notes):
    packed = PackedNotes()
    for note in notes:
        packed.add(note)
    assert (packed.notes(), packed.count) == (notes, len(notes))
    packed.clear()
    assert (packed.notes(), packed.size) == ([], 0)


def test_a_token_takes_about_five_bytes():
    rng, log, packed = Random(1), AnswerLog(), PackedNotes()
    for _ in range(20_000):
        token = min(150_000, int(10 * rng.paretovariate(0.5)))  # some are frequent, as in texts
        log.add(0, TokenChunk(0, (token,), fingerprint="f"))
        packed.add(log.take())
    assert packed.size < 5 * 20_000


def an_exchange(kept: KeptBytes, **more) -> exchange.Exchange:
    return exchange.Exchange({**scope(b"k"), **more}, asyncio.Event().wait, asyncio.Event().wait, kept, named=False)


@pytest.mark.parametrize("most", ["MOST_KEPT", "MOST_OF_ONE"])
async def test_what_has_no_room_takes_none(monkeypatch, most):
    """The largest of its client goes, also where it is the one that asks; what is told again grows without limit."""
    monkeypatch.setattr(exchange, "MOST_OF_ONE", 1 << 20)
    kept = KeptBytes(64 << 10 if most == "MOST_KEPT" else 1 << 30)
    one, notes = an_exchange(kept), Random(1).randbytes(1000) if most == "MOST_KEPT" else bytes(1000)
    for _ in range(2000):
        one.keep(notes + Random(2).randbytes(1))
    assert (one.lost, kept.lost, one.num_kept, kept._bytes.num_bytes) == (True, 1, 0, 0)
    one.close()
    assert kept._bytes.num_bytes == 0


async def test_calls_of_grpc_go_by_their_keys_as_requests_do():
    def of(metadata: list[tuple[str, str]]) -> exchange.Exchange:
        call = {"method": "/s/Generate", "metadata": metadata}
        return an_exchange(KeptBytes(), **{exchange.CALL: call}, headers=[], client=None)

    assert of([("authorization", "Bearer k")]).client == an_exchange(KeptBytes()).client
    assert of([("authorization", "Bearer l")]).client != an_exchange(KeptBytes()).client


async def test_one_clients_bodies_end_nobody_elses_stream_with_its_router(monkeypatch, caplog):
    monkeypatch.setattr(exchange, "MOST_KEPT", 1 << 20)
    monkeypatch.setattr(KeptBytes.__init__, "__defaults__", (1 << 20,))
    scopes: dict[bytes, list[dict]] = {b"big": [], b"small": []}
    goes_on = asyncio.Event()

    async def app(scope, receive, send) -> None:
        key = dict(scope["headers"])[b"authorization"].removeprefix(b"Bearer ")
        scopes[key].append(scope)
        await receive()
        await send({**START, KEPT: b"note"})
        await send(REST)
        if CONTINUES in scope:
            await send({**REST, "body": b"", "more_body": False})
            return
        await goes_on.wait()  # and then it is lost

    guard = RouterLossGuard(app, gateway=True)

    async def ask(key: bytes, size: int) -> bytes:
        sent: list[bytes] = []
        asked = iter([{"type": "http.request", "body": bytes(size), "more_body": False}])

        async def receive() -> dict:
            return next(asked, None) or await asyncio.Event().wait()

        async def send(message: dict) -> None:
            sent.append(message.get("body", b""))

        await guard(scope(key), receive, send)
        return b"".join(sent)

    monkeypatch.setattr("cluster.ingress.attempt.LEASE", 10**6)
    small = [asyncio.create_task(ask(b"small", 1000)) for _ in range(3)]
    await asyncio.sleep(0)
    big = [asyncio.create_task(ask(b"big", 128 << 10)) for _ in range(20)]
    small += [asyncio.create_task(ask(b"small", 1000)) for _ in range(3)]
    while sum(map(len, scopes.values())) < 26:
        await asyncio.sleep(0.01)
    goes_on.set()
    assert await asyncio.gather(*small) == [REST["body"]] * 6
    ends = await asyncio.gather(*big)
    whole = sum(b"router_lost" not in one for one in ends)
    assert 4 <= whole < 20, "its own exchanges pay, and no more of them than must"
    assert guard._kept.lost == 20 - whole
    assert "no room to keep a request beside its router" in caplog.text


async def test_a_router_hears_which_of_its_answers_end_with_it(monkeypatch):
    monkeypatch.setattr(exchange, "MOST_OF_ONE", 1000)
    monkeypatch.setattr("cluster.ingress.attempt.TICK", 0.01)
    monkeypatch.setattr("cluster.ingress.attempt.LEASE", 10**6)
    kept: list[bool] = []

    async def app(scope, receive, send) -> None:
        kept.append(bool(scope[KEEPS]))
        await receive()
        await send(START)
        while not check.unkept:
            waiting = asyncio.ensure_future(receive())
            await asyncio.wait((waiting,), timeout=0.05)
            waiting.cancel()
        await send({**REST, "more_body": False})

    check = IngressCheck(app)
    asked = iter([{"type": "http.request", "body": bytes(2000), "more_body": False}])

    async def receive() -> dict:
        return next(asked, None) or await asyncio.Event().wait()

    async def send(message: dict) -> None:
        pass

    async with asyncio.timeout(10):
        await RouterLossGuard(check, gateway=True)(scope(b"k"), receive, send)
    assert (kept, check.unkept) == ([True], 1)
