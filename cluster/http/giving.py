"""How an answer that is kept is given to a client: as events behind any number, as a response, or whole.

Source: WHATWG HTML, server-sent events (`id`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from cluster.answer_log import AnswerFacts, AnswerLog
from cluster.errors import ApiError
from cluster.http.asgi import Answer
from cluster.responses.record import Head
from cluster.responses.store import ResponseStore
from cluster.responses.view import AnswerView

MOST_MOVES = 3  # routers that may take an answer over while a client waits for it
# Gives out a view; returns what is left to be done with that of another router.
Give = Callable[[AnswerView, Answer], Awaitable["Give | None"]]


def show(view: AnswerView, exchange: dict[str, str], log: AnswerLog) -> None:
    """Have the exchange bear the names of the answer, and its ingress know them."""
    for name in ("id", "model", "ignored"):
        if name in view.exchange:
            exchange[name] = view.exchange[name]
    if view.log.facts is not None and log.facts is None:
        log.begin(AnswerFacts(view.log.facts.request_id, view.log.facts.created, view.log.facts.seed))


async def give_elsewhere(store: ResponseStore, head: Head, give: Give, answer: Answer) -> None:
    """Go on giving out an answer that another router has taken over. Raises `ApiError`."""
    for _ in range(MOST_MOVES):
        async with store.found(head.name, head.tenant, by_id=False) as (_, view):
            moved = await give(view, answer)
        if moved is None:
            return
        give = moved
    raise _lost()


async def whole_response(store: ResponseStore, name: str, tenant: str) -> tuple[Head, bytes]:
    """Return what was asked and the body of a response once it has ended, wherever it is made. Raises `ApiError`."""
    for _ in range(MOST_MOVES + 1):
        async with store.found(name, tenant) as (head, view):
            await view.whole()
            if not view.lost:
                return head, view.response
    raise _lost()


async def send_events(view: AnswerView, answer: Answer, behind: int) -> Give | None:
    """Send the events behind a number, each with its own as `id`, as they come.

    Returns what is to be done with the view of another router where this one has lost the answer; None = all is sent.
    """
    while not (view.status or view.over):
        await view.changed()
    if view.status not in (0, 200):
        return await send_whole(view, answer)
    await answer.events(b"")
    held = list[bytes]()
    async for number in view.after(behind):
        behind = number
        held.append(view.numbered(number))
        if number + 1 == len(view.events) or len(held) >= 64:
            await answer.events(b"".join(held))
            held.clear()
    if view.lost:
        return partial(send_events, behind=behind)
    await answer.end(b"".join(held))
    return None


async def send_response(view: AnswerView, answer: Answer, wait: bool) -> Give | None:
    """Send the body of a response. wait: for its end. Returns as `send_events`."""
    while not (view.over or (view.response and not wait)):
        await view.changed()
    view.check()
    if view.status not in (0, 200):
        return await send_whole(view, answer)
    if view.lost or not view.response:
        return partial(send_response, wait=wait)
    error = view.end(0).error() if wait else None
    if error is not None:
        raise error
    await answer.json(200, view.response)
    return None


async def send_whole(view: AnswerView, answer: Answer) -> Give | None:
    """Send an answer that is no stream, as its endpoint made it. Returns as `send_events`."""
    await view.whole()
    if view.lost or not view.status:
        return send_whole
    others = [(name, value) for name, value in view.headers if name not in (b"content-type", b"content-length")]
    await answer.json(view.status, view.body, others)
    return None


def _lost() -> ApiError:
    message = "the answer ended here before it was complete: it was deleted, or its router stops; ask for it again"
    return ApiError("router_lost", message)
