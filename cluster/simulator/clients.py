"""Clients of a simulated cluster: they ask over HTTP, through the holder, or a router's dispatcher."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import DecodeError, json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.admission.deadline import HEADER
from cluster.errors import ApiError
from cluster.simulator.answers import DELETED, LEFT, WHOLE, Answer, Scene, messages_of, prompt_of
from cluster.simulator.fleet import Fleet
from cluster.simulator.history import FREE, LIMITED, Arrive
from cluster.simulator.lives import MODEL, RouterLife
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler.scheduler import DEADLINE_EXCEEDED

PATIENCE = 100.0  # seconds for which one is looked for that nobody can be asked for
CUT = "no end"  # of an answer that has none
LOOK = 0.5  # seconds between two looks at a response that is made in the background


async def ask_dispatcher(scene: Scene, answer: Answer, life: RouterLife) -> None:
    """Ask a router without HTTP, in its process."""
    asked, loop = answer.asked, scene.fleet.loop
    params = SamplingParams(max_tokens=asked.tokens, temperature=1.0, ignore_eos=True, n=asked.choices)
    deadline = None if asked.timeout is None else loop.time() + asked.timeout
    request = Request(answer.name, tuple(prompt_of(asked)), params, seed=asked.seed, deadline=deadline)
    chunks = life.source.generate(request)
    end = WHOLE
    until = None if asked.leaves is None else loop.time() + asked.leaves
    try:
        async with asyncio.timeout_at(until):
            async for chunk in chunks:
                answer.tokens.setdefault(chunk.choice, []).extend(chunk.token_ids)
                if asked.pace:
                    await asyncio.sleep(asked.pace)
    except TimeoutError:
        end = LEFT
    except ApiError as error:
        end, answer.status = error.code, error.status
    await chunks.aclose()  # type: ignore[attr-defined]
    scene.end(answer, end)


class HttpClient:
    """Asks over HTTP and reads what comes into an `Answer`."""

    def __init__(self, scene: Scene, answer: Answer) -> None:
        self._scene = scene
        self._answer = answer
        self._over = False
        self._events = False

    async def ask(self, app: ASGIApp) -> None:
        """Have an application answer."""
        asked, loop, answer = self._answer.asked, self._scene.fleet.loop, self._answer
        hung_up: asyncio.Future[None] = loop.create_future()
        if asked.leaves is not None:
            loop.call_later(asked.leaves, _resolve, hung_up)
        sent: list[Message] = [{"type": "http.request", "body": json.encode(self._body()), "more_body": False}]

        async def receive() -> Message:
            if sent:
                return sent.pop()
            await asyncio.shield(hung_up)
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if not hung_up.done():
                self._take(message)
                if asked.pace and not self._over:
                    await asyncio.sleep(asked.pace)

        await app(self._scope(), receive, send)
        if not answer.ends:
            self._scene.end(answer, LEFT if hung_up.done() else CUT)

    def _body(self) -> dict[str, Any]:
        asked = self._answer.asked
        body: dict[str, Any] = {
            "model": MODEL, "max_tokens": asked.tokens, "n": asked.choices, "ignore_eos": True,
            "stream": asked.stream, "return_token_ids": True,
        }  # fmt: skip
        body |= {"messages": messages_of(asked)} if asked.chat else {"prompt": prompt_of(asked)}
        return body | {"seed": asked.seed} if asked.seeded else body

    def _scope(self) -> Scope:
        asked = self._answer.asked
        headers = headers_of(self._scene, asked)
        path = "/v1/files" if asked.upload else "/v1/chat/completions" if asked.chat else "/v1/completions"
        return {
            "type": "http", "method": "POST", "path": path, "query_string": b"", "root_path": "",
            "headers": headers,
        }  # fmt: skip

    def _take(self, message: Message) -> None:
        """Take in a message of ASGI."""
        answer, violations = self._answer, self._scene.violations
        if self._over:
            violations.append(f"{answer.name}: {message['type']} after the end of its answer")
        elif message["type"] == "http.response.start":
            if answer.status:
                violations.append(f"{answer.name}: its answer has two heads")
            answer.status = message["status"]
            headers = dict(message["headers"])
            self._events = headers[b"content-type"].startswith(b"text/event-stream")
        else:
            answer.body += message.get("body", b"")
            self._over = not message.get("more_body", False)
            if self._over:
                self._scene.end(answer, self._read())

    def _read(self) -> str:
        """Return how the answer ended."""
        answer = self._answer
        if not self._events:
            told = json.decode(answer.body)
            if answer.status != 200:
                return str(told["error"]["code"])
            self._add(told)
            return WHOLE
        end = ""
        for block in answer.body.split(b"\n\n"):
            if not block or block.startswith(b":"):
                continue
            if end:
                self._scene.violations.append(f"{answer.name}: {block!r} after its end")
            data = block.removeprefix(b"data: ")
            if data == b"[DONE]":
                end = WHOLE
                continue
            try:
                told = json.decode(data)
            except DecodeError:
                self._scene.violations.append(f"{answer.name}: its stream has {block[-90:]!r}, which is no event")
                return "garbled"
            if "error" in told:
                end = str(told["error"]["code"])
            else:
                self._add(told)
        return end or "cut"

    def _add(self, told: dict[str, Any]) -> None:
        for choice in told["choices"]:
            self._answer.tokens.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())


def headers_of(scene: Scene, asked: Arrive, timed: bool = True) -> list[tuple[bytes, bytes]]:
    """Return the headers of a request. timed: it has the client's time limit."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    if asked.timeout is not None and timed:
        headers.append((HEADER.encode(), str(asked.timeout).encode()))
    if scene.history.quota is not None:
        headers.append((b"authorization", f"Bearer {LIMITED if asked.limited else FREE}".encode()))
    return headers


class KeptClient:
    """Has a response made in the background, and asks for it until it has ended, or deletes it."""

    def __init__(self, scene: Scene, answer: Answer) -> None:
        self._scene = scene
        self._answer = answer

    async def ask(self, app: ASGIApp) -> None:
        """Have an application make it."""
        asked, answer = self._answer.asked, self._answer
        (message,) = messages_of(asked)
        body = {
            "model": MODEL, "input": message["content"], "max_output_tokens": asked.tokens, "ignore_eos": True,
            "background": True, "seed": asked.seed,
        }  # fmt: skip
        status, told = await self._call(app, "POST", "", body)
        while status == 200 and told["status"] in ("queued", "in_progress"):
            answer.kept_as = told["id"]
            await asyncio.sleep(LOOK)
            status, told = await self._get(app)
        answer.status = status
        if status == 404 and answer.unwanted:
            end = DELETED
        elif told.get("error"):
            end = DEADLINE_EXCEEDED if "deadline" in told["error"]["message"] else str(told["error"]["code"])
        else:
            end, answer.text = WHOLE, told["output"][0]["content"][0]["text"]
        self._scene.end(answer, end)

    async def delete(self, app: ASGIApp) -> None:
        """Have it kept no more."""
        answer = self._answer
        answer.unwanted = True
        status, _ = await self._call(app, "DELETE", f"/{answer.kept_as}")
        answer.deleted, answer.said_gone = status == 200, status == 404

    async def is_there(self, app: ASGIApp) -> bool:
        """Return whether it is kept."""
        return (await self._get(app))[0] == 200

    async def _get(self, app: ASGIApp) -> tuple[int, Any]:
        """Return it, once somebody can say what it is, or after `PATIENCE`."""
        loop = self._scene.fleet.loop
        until = loop.now + PATIENCE
        while (found := await self._call(app, "GET", f"/{self._answer.kept_as}"))[0] == 503 and loop.now < until:
            await asyncio.sleep(LOOK)
        return found

    async def _call(self, app: ASGIApp, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        status, asked, got = 0, self._answer.asked, bytearray()
        headers = headers_of(self._scene, asked, timed=body is not None)
        sent = [{"type": "http.request", "body": b"" if body is None else json.encode(body), "more_body": False}]

        async def receive() -> Message:
            if not sent:
                await asyncio.Event().wait()
            return sent.pop()

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            got.extend(message.get("body", b""))

        scope = {
            "type": "http", "method": method, "path": f"/v1/responses{path}", "query_string": b"", "root_path": "",
            "headers": headers,
        }  # fmt: skip
        await app(scope, receive, send)
        try:
            return status, json.decode(bytes(got))
        except DecodeError:  # it was cut
            return 0, {"error": {"code": CUT, "message": ""}}


class ServeProxy:
    """Passes an exchange on as Serve does: to the router that was asked the fewest times, be it stopped (ASGI)."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._open: dict[_Hop, None] = {}  # in the order in which they began

    def died(self) -> None:
        """Have routers hear that it is dead."""
        for hop in self._open:
            hop.hang_up()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one exchange on."""
        while not self._fleet.routers:
            await self._fleet.serve.changed_or(0.25)
        life = min(self._fleet.routers.values(), key=lambda one: one.asked)
        life.asked += 1
        hop = _Hop(life)
        self._open[hop] = None
        try:
            await hop.run(scope, receive, send)
        finally:
            del self._open[hop]


class _Hop:
    """One exchange between the proxy and a router: a queue each way, until the router is dead."""

    def __init__(self, life: RouterLife) -> None:
        self._life = life
        self._asked: asyncio.Queue[Message] = asyncio.Queue()
        self._said: asyncio.Queue[Message | None] = asyncio.Queue()

    def hang_up(self) -> None:
        """Tell the router that nobody waits."""
        self._asked.put_nowait({"type": "http.disconnect"})

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        own = {**scope, "headers": list(scope["headers"]), "state": {}}
        app = self._life.process.spawn(self._answer(own))
        listening = asyncio.create_task(self._listen(receive))
        over = asyncio.create_task(self._life.over.wait())
        over.add_done_callback(lambda _: self._said.put_nowait(None))
        try:
            while (message := await self._said.get()) is not None:
                await send(message)
        finally:
            for task in (app, listening, over):
                task.cancel()

    async def _answer(self, scope: Scope) -> None:
        async def say(message: Message) -> None:
            self._said.put_nowait(dict(message))

        self._life.exchanges += 1
        try:
            await self._life.app(scope, self._asked.get, say)
        finally:
            self._life.exchanges -= 1
            self._said.put_nowait(None)

    async def _listen(self, receive: Receive) -> None:
        while True:
            message = await receive()
            self._asked.put_nowait(dict(message))
            if message["type"] == "http.disconnect":
                return


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
