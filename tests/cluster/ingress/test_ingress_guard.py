"""The middleware around Serve's proxy: what a client gets when the router behind it is lost, in every phase."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable

import httpx
import openai
import pytest
import uvicorn.config
from ray.exceptions import ActorDiedError, TaskCancelledError

from cluster.answer_log import ANSWER_LOG, CONTINUES, KEPT, LISTENS, ROUTER_WAIT, SILENCE, AnswerFacts
from cluster.client_id import SERVERS_NAME
from cluster.ingress.bounded_http import BoundedHttp
from cluster.ingress.guard import CALLBACK, LEARNING, MARK, TELLS_TAKEN, RouterLossGuard, proxy_middlewares
from cluster.ingress.router_side import TAKES_BACK, IngressCheck
from deploy.cli.client import is_guarded
from tests.openai_app import serving

EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
CHUNK = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
CHOICE = {"index": 0, "delta": {"content": "half"}, "finish_reason": None}
FRAME = b"data: " + json.dumps(CHUNK | {"choices": [CHOICE]}).encode() + b"\n\n"


def start(headers=EVENTS, status: int = 200) -> dict:
    return {"type": "http.response.start", "status": status, "headers": headers}


def part(body: bytes, more: bool = True) -> dict:
    return {"type": "http.response.body", "body": body, "more_body": more}


def proxy(*messages: dict | Exception) -> Callable[..., Awaitable[None]]:
    """A proxy as Serve's: it passes on what its router sent, and returns when nothing more comes."""

    async def app(scope, receive, send) -> None:
        if not any(name == b"x-request-id" for name, _ in scope["headers"]):
            scope["headers"] = [*scope["headers"], (b"x-request-id", b"made-by-serve")]
        for message in messages:
            if isinstance(message, Exception):
                raise message
            await send(message)

    return app


async def ask(app, headers=(), path="/v1/completions") -> list[dict]:
    """What one request to `app` sends to its client."""
    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)

    async def receive() -> dict:
        return {"type": "http.disconnect"}

    scope = {"type": "http", "path": path, "headers": list(headers)}
    await RouterLossGuard(app)(scope, receive, send)
    return sent


async def test_a_stream_that_stops_gets_the_error_as_its_last_event() -> None:
    sent = await ask(proxy(start(), part(FRAME)), [(b"x-request-id", b"mine")])
    *before, last = sent
    assert before == [start(), part(FRAME)]
    assert not last.get("more_body")
    error = json.loads(last["body"].removeprefix(b"data: "))["error"]
    assert (error["code"], error["retryable"], error["request_id"]) == ("router_lost", True, "mine")
    assert last["body"].endswith(b"\n\n")


@pytest.mark.parametrize("cut", [1, len(FRAME) // 2, len(FRAME) - 1])
async def test_nothing_is_written_into_the_middle_of_an_event(monkeypatch, cut) -> None:
    """Events above 1 MiB come in pieces: what tells of a loss or a wait stands between two events."""
    monkeypatch.setattr("cluster.ingress.exchange.QUIET", 0.0)
    monkeypatch.setattr("cluster.ingress.attempt.TICK", 0.01)
    monkeypatch.setattr("cluster.ingress.attempt.LEASE", 10**6)
    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)

    async def app(scope, receive, tell) -> None:
        await tell({**start(), KEPT: b"note", ROUTER_WAIT: 5.0})
        if CONTINUES not in scope:
            await tell(part(FRAME + FRAME[:cut]))
            return
        await asyncio.sleep(0.05)  # it joins a stream whose client waits in the middle of an event
        await tell(part(FRAME + FRAME))
        await asyncio.sleep(0.05)
        await tell(part(b"", more=False))

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    await RouterLossGuard(app)(scope, asyncio.Event().wait, send)
    assert b"".join(one.get("body", b"") for one in sent) == FRAME * 2
    assert await ask(proxy(start(), part(FRAME + FRAME[:cut]))) == [start(), part(FRAME + FRAME[:cut])]


@pytest.mark.parametrize("died", [(), (RuntimeError("the proxy itself"),)], ids=["ended", "raised"])
async def test_who_has_no_answer_yet_gets_a_typed_503(died: tuple) -> None:
    head, body = await ask(proxy(*died))
    assert head["status"] == 503
    headers = dict(head["headers"])
    assert headers[b"retry-after"] == b"1"
    assert headers[b"x-request-id"] == b"made-by-serve"
    assert headers[b"content-length"] == str(len(body["body"])).encode()
    error = json.loads(body["body"])["error"]
    assert (error["code"], error["request_id"]) == ("router_lost", "made-by-serve")
    assert not body.get("more_body")


def routed(name: bytes, *messages: dict) -> Callable[..., Awaitable[None]]:
    """Serve's proxy before a router of ours, which has a name of its own for the request: each adds its header."""

    async def app(scope, receive, send) -> None:
        given = dict(scope["headers"]).get(b"x-request-id", b"made-by-serve")
        named = [(SERVERS_NAME.encode(), name), (b"x-request-id", given)]
        await proxy(start([*EVENTS, *named], 400), *messages)(scope, receive, send)

    return app


@pytest.mark.parametrize(
    ("sent", "shown"),
    [([], b"req-1"), ([(b"x-request-id", b"mine")], b"mine"), ([(b"x-request-id", b"a b")], b"req-1")],
)
async def test_an_answer_shows_one_id_the_clients_own_or_the_routers(sent: list, shown: bytes) -> None:
    head, _ = await ask(routed(b"req-1", part(b"{}", more=False)), sent)
    assert [value for name, value in head["headers"] if name == b"x-request-id"] == [shown]
    assert SERVERS_NAME.encode() not in dict(head["headers"])


async def test_a_stream_that_stops_ends_with_the_id_that_it_began_with() -> None:
    head, _, last = await ask(routed(b"chatcmpl-1", part(FRAME)))
    assert dict(head["headers"])[b"x-request-id"] == b"chatcmpl-1"
    assert json.loads(last["body"].removeprefix(b"data: "))["error"]["request_id"] == "chatcmpl-1"


@pytest.mark.parametrize("label", [b"\x1b[2Ja", b"a\x85forged", b"a" * 2000], ids=["escape", "next line", "long"])
async def test_a_clients_label_that_is_unfit_for_a_log_is_in_none(caplog, label: bytes) -> None:
    with caplog.at_level(logging.WARNING, "cluster"):
        _, body = await ask(proxy(), [(b"x-request-id", label)])
    assert json.loads(body["body"])["error"]["request_id"] is None
    (record,) = caplog.records
    assert label.decode("latin-1") not in record.getMessage()


async def test_numbered_events_are_ended_by_a_numbered_error() -> None:
    frames = (
        b'event: a\ndata: {"type":"a","sequence_number":7}\n\nevent: b\ndata: {"type":"b","sequence_number":8}\n\n'
    )
    last = (await ask(proxy(start(), part(frames), part(b""))))[-1]["body"]
    kind, data, *_ = last.split(b"\n")
    assert kind == b"event: error"
    event = json.loads(data.removeprefix(b"data: "))
    assert (event["type"], event["sequence_number"], event["code"]) == ("error", 9, "router_lost")


async def test_messages_are_ended_by_an_error_in_anthropics_form() -> None:
    frames = b'event: ping\ndata: {"type":"ping"}\n\n'
    last = (await ask(proxy(start(), part(frames), part(b"")), path="/v1/messages"))[-1]["body"]
    kind, data, *_ = last.split(b"\n")
    assert kind == b"event: error"
    event = json.loads(data.removeprefix(b"data: "))
    assert (event["type"], event["error"]["type"], event["error"]["code"]) == (
        "error", "overloaded_error", "router_lost",
    )  # fmt: skip
    head, body = await ask(proxy(), path="/v1/messages/count_tokens")
    told = json.loads(body["body"])
    assert told["error"]["type"] == "overloaded_error"
    assert dict(head["headers"])[b"request-id"] == (told["request_id"] or "").encode()


async def test_whole_answers_pass_as_they_are() -> None:
    stream = [start(), part(FRAME), part(b"data: [DONE]\n\n", more=False)]
    assert await ask(proxy(*stream)) == stream
    refusal = [start([(b"content-length", b"2")], 400), part(b"{}", more=False)]
    assert await ask(proxy(*refusal)) == refusal


async def test_nothing_is_told_to_a_client_that_left() -> None:
    async def cancelled(scope, receive, send) -> None:
        await send(start())
        await receive()

    assert await ask(cancelled) == []


async def test_a_router_that_dies_behind_the_head_of_a_whole_answer_costs_nothing() -> None:
    head = start([(b"content-type", b"application/json"), (b"content-length", b"2")])
    assert await ask_again([told(head)], [told(head), part(b"{}", more=False)]) == [head, part(b"{}", more=False)]


async def test_what_is_below_a_prefix_is_asked_again_as_without_one() -> None:
    head, end = start([(b"content-type", b"application/json"), (b"content-length", b"2")]), part(b"{}", more=False)
    assert await ask_again([told(head)], [told(head), end], path="/llm/v1/chat/completions") == [head, end]
    (lost, _) = await ask_again([told(head)], [told(head), end], path="/llm/v1/batches")
    assert lost["status"] == 503


async def test_a_proxy_that_knows_its_apps_not_yet_says_so_and_one_that_does_says_not_found() -> None:
    now = 100.0
    not_found = [start([(b"content-type", b"text/plain")], 404), part(b"Path '/v1/x' not found.", more=False)]
    app = RouterLossGuard(proxy(*not_found), clock=lambda: now)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        answer = await client.get("/v1/x")
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "no_router"
        now += LEARNING
        assert (await client.get("/v1/x")).status_code == 404


@pytest.mark.parametrize("spelt", ["/-/routes", "/%2d/routes", "/-/%72outes?x=1"])
async def test_which_apps_there_are_is_told_to_nobody(spelt: str) -> None:
    routes = [start([(b"content-type", b"application/json")]), part(b'{"/":"squadron"}', more=False)]
    app = RouterLossGuard(proxy(*routes))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        answer = await client.get(spelt, headers={"x-request-id": "mine"})
        unnamed = await client.get(spelt)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["request_id"]) == (404, "not_found", "mine")
    assert answer.headers["x-request-id"] == "mine"
    assert "retry-after" not in answer.headers
    assert unnamed.headers["x-request-id"] == unnamed.json()["error"]["request_id"]
    assert "squadron" not in answer.text


async def test_below_a_root_path_the_same_path_is_closed() -> None:
    app = RouterLossGuard(proxy(start(), part(b"{}", more=False)))
    transport = httpx.ASGITransport(app, root_path="/llm")
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.get("/llm/-/routes")).status_code == 404


@pytest.mark.parametrize("path", ["/-/healthz", "/-/routes/", "/v1/-/routes", "/"])
async def test_health_for_balancers_and_all_other_paths_pass(path: str) -> None:
    app = RouterLossGuard(proxy(start([(b"content-type", b"text/plain")]), part(b"success", more=False)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        assert (await client.get(path)).text == "success"


async def test_a_body_of_a_given_length_is_cut_not_filled_up() -> None:
    app = proxy(start([(b"content-type", b"application/json"), (b"content-length", b"100")]), part(b'{"half":'))
    async with serving(RouterLossGuard(_with_lifespan(app))) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        data = await asyncio.wait_for(reader.read(), 10)  # to the end of the connection
        writer.close()
    assert data.endswith(b'\r\n\r\n{"half":')


@pytest.mark.parametrize("route", ["chat", "responses"])
async def test_the_openai_client_raises_the_typed_error(route: str) -> None:
    numbered = b'event: x\ndata: {"type":"response.output_text.delta","sequence_number":0,"delta":"half"}\n\n'
    app = proxy(start(), part(FRAME if route == "chat" else numbered))
    async with (
        serving(RouterLossGuard(_with_lifespan(app))) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        if route == "chat":
            messages = [{"role": "user", "content": "x"}]
            stream = await client.chat.completions.create(model="m", messages=messages, stream=True)
        else:
            stream = await client.responses.create(model="m", input="x", stream=True)
        with pytest.raises(openai.APIError, match="router was lost") as raised:
            async for _ in stream:
                pass
    assert raised.value.code == "router_lost"


async def test_a_router_tells_once_when_its_proxy_is_not_guarded(caplog: pytest.LogCaptureFixture) -> None:
    app = IngressCheck(proxy(start(), part(b"", more=False)))
    assert app.guarded is None
    await ask(app)
    assert app.guarded is True
    with caplog.at_level(logging.WARNING):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            for _ in range(3):
                await client.get("/")
    assert app.guarded is False
    assert len(caplog.records) == 1
    assert CALLBACK in caplog.text


@pytest.mark.parametrize("lost", [TaskCancelledError(), ActorDiedError()], ids=lambda one: type(one).__name__)
async def test_a_client_whose_proxy_is_lost_has_left(lost: Exception) -> None:
    """Serve raises what its call to the proxy raised, once; whoever asks again would wait for ever."""
    arriving = iter([{"type": "http.request", "body": b"{", "more_body": True}, lost])
    heard = []

    async def receive() -> dict:
        message = next(arriving)
        if isinstance(message, Exception):
            raise message
        return message

    async def app(_scope, receive, _send) -> None:
        for _ in range(3):
            heard.append((await receive())["type"])

    await IngressCheck(app)({"type": "http", "headers": [(MARK, b"")]}, receive, None)
    assert heard == ["http.request", "http.disconnect", "http.disconnect"]


@pytest.mark.parametrize(
    ("answer", "guarded"),
    [
        (httpx.Response(200, json={"ready": True, "guarded": True}), True),
        (httpx.Response(200, json={"ready": True, "guarded": False}), False),
        (httpx.Response(503, json={"ready": False, "guarded": False}), False),
        (httpx.Response(200, text="of another program"), True),
    ],
)
def test_the_command_reads_from_ready_whether_it_must_warn(answer: httpx.Response, guarded: bool) -> None:
    with httpx.Client(transport=httpx.MockTransport(lambda _: answer), base_url="http://test") as client:
        assert is_guarded(client) is guarded


async def test_a_clients_own_mark_does_not_reach_the_router() -> None:
    seen: list = []

    async def app(scope, receive, send) -> None:
        seen.extend(value for name, value in scope["headers"] if name == MARK)
        await send(start())
        await send(part(b"", more=False))

    await ask(app, [(MARK, b"forged")])
    assert seen == [TELLS_TAKEN]


def test_serve_finds_the_middleware_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.ingress.guard.log_to_serve", lambda: None)  # it would change this process's loggers
    monkeypatch.setattr("uvicorn.config.HTTP_PROTOCOLS", dict(uvicorn.config.HTTP_PROTOCOLS))
    module, name = CALLBACK.split(":")
    assert module == proxy_middlewares.__module__
    assert name == proxy_middlewares.__name__
    assert [one.cls for one in proxy_middlewares()] == [RouterLossGuard]
    server = uvicorn.Config(lambda: None, factory=True)
    server.load()
    assert server.http_protocol_class is BoundedHttp


def _with_lifespan(app):
    async def whole(scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                assert (await receive())["type"] == f"lifespan.{kind}"
                await send({"type": f"lifespan.{kind}.complete"})
            return
        await app(scope, receive, send)

    return whole


# --- what another router makes of an answer that was begun


def told(message: dict, note: bytes = b"n") -> dict:
    """A message of a router that has what it makes kept."""
    return message | {KEPT: note, ROUTER_WAIT: 2.0}


async def ask_again(
    *answers: list, pause: float = 0.0, router_wait: float = 60.0, path: str = "/v1/completions"
) -> list[dict]:
    """What a client gets of a POST for which one router after the other answers, each so far and no further.

    None: nothing more comes. pause: seconds before each message. router_wait: while no router has said its own.
    """
    left = iter(answers)

    async def app(scope, receive, send) -> None:
        for message in next(left):
            if message is None:
                await asyncio.Event().wait()
            await asyncio.sleep(pause)
            await send(dict(message))

    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)

    async def receive() -> dict:
        await asyncio.Event().wait()
        raise AssertionError

    scope = {"type": "http", "method": "POST", "path": path, "headers": []}
    guard = RouterLossGuard(app)
    guard._wait = router_wait
    async with asyncio.timeout(30):
        await guard(scope, receive, send)
    return sent


BEGUN = [told(start()), told(part(b"data: 1\n\n")), told(part(b"data: 2\n\n"))]
REST = part(b"data: 3\n\ndata: [DONE]\n\n", more=False)


def body_of(sent: list[dict]) -> bytes:
    return b"".join(one.get("body", b"") for one in sent)


async def test_what_the_client_has_is_dropped_however_it_is_cut() -> None:
    again = [told(start()), told(part(b"da")), told(part(b"ta: 1\n\ndata: 2\n\nda")), part(b"ta: 3\n\n", more=False)]
    sent = await ask_again(BEGUN, again)
    assert body_of(sent) == b"data: 1\n\ndata: 2\n\ndata: 3\n\n"
    assert [one["type"] for one in sent].count("http.response.start") == 1
    assert not sent[-1]["more_body"]


@pytest.mark.parametrize(
    "again",
    [
        [told(start()), told(part(b"data: 1\n\ndata: X\n\n")), REST],
        [told(start()), told(part(b"data: 1\n\n", more=False))],
        [told(start()), told(part(b'data: {"error":{}}\n\n', more=False))],
        [told(start([(b"content-type", b"application/json")], 400)), told(part(b"{}", more=False))],
    ],
    ids=["differs", "short", "short error", "refusal"],
)
async def test_another_answer_is_never_passed_off_as_the_rest(again: list) -> None:
    sent = await ask_again(BEGUN, again)
    assert body_of(sent[:-1]) == b"data: 1\n\ndata: 2\n\n"
    assert json.loads(sent[-1]["body"][6:])["error"]["code"] == "router_lost"


async def test_a_routers_own_refusal_is_the_last_event() -> None:
    error = json.dumps({"error": {"code": "model_changed", "retryable": True}}).encode()
    refusal = [told(start([(b"content-type", b"application/json")], 503)), part(error, more=False)]
    sent = await ask_again(BEGUN, refusal)
    assert json.loads(sent[-1]["body"][6:])["error"]["code"] == "model_changed"


@pytest.mark.parametrize("code", ["no_replica", None])
async def test_who_cannot_go_on_now_is_asked_again(code: str | None) -> None:
    """A router without a replica, or Serve's own words where it has no router to give."""
    error = b"no" if code is None else json.dumps({"error": {"code": code, "retryable": True}}).encode()
    kind = b"text/plain" if code is None else b"application/json"
    refusal = [start([(b"content-type", kind)], 503), part(error, more=False)]
    sent = await ask_again(BEGUN, refusal, refusal, [*BEGUN, REST])
    assert body_of(sent).endswith(b"data: [DONE]\n\n") and body_of(sent).count(b"data: 1") == 1


async def test_a_router_of_an_earlier_version_that_goes_on_is_not_cut_off(monkeypatch) -> None:
    """It says nothing of what it makes; what it streams is not late however long it takes."""
    monkeypatch.setattr("cluster.ingress.attempt.TICK", 0.05)
    answer = [start(), *[part(FRAME)] * 3, part(FRAME, more=False)]
    assert body_of(await ask_again([], answer, pause=0.7, router_wait=2.0)) == 4 * FRAME


async def test_a_router_that_says_nothing_is_left_also_before_its_first_word(monkeypatch) -> None:
    monkeypatch.setattr("cluster.ingress.attempt.TICK", 0.05)
    assert body_of(await ask_again(BEGUN, [None], [*BEGUN, REST])).endswith(b"data: [DONE]\n\n")


async def test_a_request_that_kills_every_router_a_little_later_is_given_up() -> None:
    answers = [[told(start()), *[told(part(b"data: %d\n\n" % i)) for i in range(n)]] for n in range(1, 60)]
    sent = await ask_again(*answers)
    assert json.loads(sent[-1]["body"][6:])["error"]["code"] == "router_lost"
    assert len(sent) < 40


async def test_nothing_is_kept_of_an_exchange_that_is_over() -> None:
    guard = RouterLossGuard(proxy(*BEGUN, REST))
    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    await guard(scope, asyncio.Event().wait, send)
    assert guard._kept._bytes.num_bytes == 0


@pytest.mark.parametrize("tells", [True, False], ids=["this guard", "one that tells nothing of itself"])
async def test_a_router_that_may_have_been_left_asks_whether_it_was(tells: bool) -> None:
    """What it was charged for is told apart by that: its successor charges for a prompt whose facts were not kept."""
    loop = asyncio.get_running_loop()
    seen: dict[str, object] = {}

    async def answer(scope, receive, send) -> None:
        log = scope["state"][ANSWER_LOG]
        hearing = asyncio.create_task(receive())
        log.spoke(since=loop.time() - SILENCE - 1)  # as a request that came while the router stood still
        log.begin(AnswerFacts("req-1", 1, 2))
        await send(start())
        await send(part(FRAME))
        seen["doubt"] = log.may_be_elsewhere
        await asyncio.sleep(0.01)
        seen["told"] = log.told_facts, not log.may_be_elsewhere
        ending = loop.time()
        await send(part(b"", more=False))
        seen["waited"] = loop.time() - ending >= TAKES_BACK
        hearing.cancel()

    router = IngressCheck(answer)

    async def deaf(scope, receive, send) -> None:
        async def heard() -> dict:
            while (message := await receive())["type"] == LISTENS:
                pass
            return message

        await router(scope, receive if tells else heard, send)

    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    await RouterLossGuard(deaf)(scope, asyncio.Event().wait, send)
    assert sent == [start(), part(FRAME), part(b"", more=False)]
    assert seen == {"doubt": True, "told": (tells, tells), "waited": not tells}
