"""`squadron chat`: a conversation in the terminal, streamed from any OpenAI-compatible server."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO
from urllib.parse import quote

import httpx
from rich.console import Console

from deploy.cli.client import DONE, event_data, key_headers, server_url
from engine.errors import SquadronError

with suppress(ImportError):  # Windows has none
    import readline  # noqa: F401  # importing it is what gives `input` line editing and history

# A model may think for long before its first token; only connecting has a short limit.
TIMEOUT = httpx.Timeout(connect=5.0, read=600.0, write=30.0, pool=5.0)


KEY_HEADER, LAST_HEADER = "Idempotency-Key", "Last-Event-ID"
PATIENCE = 60.0  # seconds for a server to come back in the middle of an answer
PAUSE = 0.5  # seconds between two tries


class BrokenOffError(SquadronError):
    """An answer ended before it was complete; another try may bring the rest."""


class ChatError(SquadronError):
    """The server cannot be talked to, or refused; one sentence."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Where and how to ask. model: None = the first that the server has; system: a first message, or None."""

    url: str
    model: str | None = None
    system: str | None = None
    max_tokens: int = 512
    temperature: float = 0.7
    api_key: str | None = None


@dataclass(slots=True)
class ChatAnswer:
    """One finished answer. seconds: from the first token to the last.

    name: the id that the server gave it. last_id: of the last event, None from a server that numbers none. lost: its
    connection is, for now.
    """

    text: str = ""
    tokens: int = 0
    seconds: float = 0.0
    first_token: float = 0.0
    finish_reason: str | None = None
    name: str | None = None
    last_id: str | None = None
    lost: bool = False

    @property
    def speed(self) -> str:
        """Tokens, their rate and the time to the first, in words."""
        rate = f", {(self.tokens - 1) / self.seconds:.0f} tokens/s" if self.tokens > 1 and self.seconds > 0 else ""
        cut = ", cut at --max-tokens" if self.finish_reason == "length" else ""
        return f"{self.tokens} tokens{rate}, first after {self.first_token * 1000:.0f} ms{cut}"


class Chat:
    """One conversation. Raises `ChatError` when the server cannot be reached at all."""

    def __init__(self, options: ChatOptions, console: Console | None = None) -> None:
        base, headers = server_url(options.url), key_headers(options.api_key)
        self._client = httpx.Client(base_url=base, headers=headers, timeout=TIMEOUT)
        self._options = options
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._model = options.model or ""
        self._messages: list[dict[str, str]] = []
        self._unanswered = 0
        self._others: list[str] = []  # models beside the one that was taken for want of a choice

    def run(self, lines: TextIO) -> bool:
        """Talk until /exit or the end of `lines`; from a pipe each line is one message, and no prompt is shown.

        Returns whether all that was piped in was answered; of a person's messages that person saw it.
        """
        interactive = lines.isatty()
        with self._client:
            self._model = self._model or self._first_model()
            self.clear()
            if interactive:
                self._dim(f"{self._model} at {self._client.base_url}   /clear forgets, /exit or Ctrl-D ends")
                if self._others:
                    self._dim(f"--model chooses another one: {', '.join(self._others)}")
            for line in _typed(self._console) if interactive else lines:
                if not self.take(line.strip()):
                    break
        return interactive or not self._unanswered

    def send(self, message: str) -> bool:
        """Send one message, whatever is in it; return whether it was answered."""
        with self._client:
            self._model = self._model or self._first_model()
            self.clear()
            self._say(message)
        return not self._unanswered

    def take(self, line: str) -> bool:
        """Act on one line; return whether the conversation goes on."""
        if line in ("/exit", "/quit"):
            return False
        if line == "/clear":
            self.clear()
            self._dim("forgotten")
        elif line.startswith("/"):
            self._dim("commands: /clear, /exit")
        elif line:
            self._say(line)
        return True

    def clear(self) -> None:
        """Forget the conversation; the system message stays."""
        system = self._options.system
        self._messages = [{"role": "system", "content": system}] if system else []

    def _say(self, line: str) -> None:
        self._messages.append({"role": "user", "content": line})
        answer = ChatAnswer()
        try:
            self._stream(answer)
        except KeyboardInterrupt:
            self._console.print()
            self._end(answer)
            self._dim("stopped")
        except (ChatError, httpx.HTTPError) as error:
            self._console.print(f"\nError: {error or type(error).__name__}", style="red", markup=False)
            self._messages.pop()
            self._unanswered += 1
            return
        self._messages.append({"role": "assistant", "content": answer.text})

    def _stream(self, answer: ChatAnswer) -> None:
        """Show an answer; where its connection is lost, go on behind the last event that came."""
        began, body, headers = time.perf_counter(), self._body(), {KEY_HEADER: secrets.token_hex(16)}
        lost_at: float | None = None  # since when nothing more has come
        while True:
            had = answer.last_id
            try:
                self._receive(body, headers, answer, began)
                if answer.finish_reason is None:
                    raise BrokenOffError("the server ended the stream without saying why")
                break
            except (httpx.TransportError, BrokenOffError) as error:
                now = time.perf_counter()
                lost_at = now if lost_at is None or answer.last_id != had else lost_at
                if answer.last_id is None or now - lost_at > PATIENCE:  # a server that numbers no events keeps none
                    began_to_come = "the answer broke off: " if answer.name or answer.text else ""
                    raise ChatError(f"{began_to_come}{error or type(error).__name__}") from error
                if not answer.lost:
                    self._console.print(f" [connection lost: {error}]", style="dim", markup=False)
                answer.lost = True
                headers[LAST_HEADER] = answer.last_id
                time.sleep(PAUSE)
        self._console.print()
        self._dim(answer.speed)

    def _end(self, answer: ChatAnswer) -> None:
        """Have the server end an answer that it makes whether or not somebody reads it."""
        if answer.last_id is None or answer.name is None:  # it numbers no events: it keeps nothing
            return
        try:
            response = self._client.delete(f"/v1/chat/completions/{quote(answer.name, safe='')}", timeout=5.0)
        except (httpx.HTTPError, KeyboardInterrupt) as error:
            self._dim(f"the server may go on with it: {error or type(error).__name__}")
            return
        if response.status_code not in (200, 404):
            self._dim(f"the server may go on with it: {_refusal(response)}")

    def _receive(self, body: dict[str, Any], headers: dict[str, str], answer: ChatAnswer, began: float) -> None:
        """Take an answer, or the rest of one, to the end of its stream. Raises `BrokenOffError`, `ChatError`."""
        with self._client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                response.read()
                if KEY_HEADER in headers and _refused_param(response) == KEY_HEADER:  # it keeps no answers
                    del headers[KEY_HEADER]
                    self._receive(body, headers, answer, began)
                    return
                failure = BrokenOffError if response.status_code in (429, 500, 502, 503) else ChatError
                raise failure(_refusal(response))
            for number, event in sse_events(response.iter_lines()):
                if answer.lost:
                    self._dim("[reconnected: the answer goes on]")
                    answer.lost = False
                answer.name = answer.name or event.get("id")
                self._take_event(event, answer, time.perf_counter() - began, number)

    def _take_event(self, event: dict[str, Any], answer: ChatAnswer, elapsed: float, number: str | None) -> None:
        if "error" in event:
            failure = BrokenOffError if event["error"].get("code") == "router_lost" else ChatError
            raise failure(str(event["error"].get("message", event["error"])))
        answer.last_id = number
        usage = event.get("usage")
        if usage:
            answer.tokens = int(usage["completion_tokens"])
        for choice in event.get("choices", []):
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            text = choice["delta"].get("content") or ""
            if not text:
                continue
            if not answer.text:
                answer.first_token = elapsed
            answer.seconds = elapsed - answer.first_token
            answer.text += text
            self._console.print(text, end="", markup=False)

    def _body(self) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": self._messages,
            "max_tokens": self._options.max_tokens,
            "temperature": self._options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def _first_model(self) -> str:
        try:
            response = self._client.get("/v1/models")
        except httpx.HTTPError as error:
            raise ChatError(
                f"no server answers at {self._client.base_url} ({error}); start one with `squadron serve demo` "
                "or give its address with --url"
            ) from error
        if response.status_code != 200:
            raise ChatError(_refusal(response))
        cards = response.json()["data"]
        own = [str(card["id"]) for card in cards if card.get("root", card["id"]) == card["id"]]  # no aliases
        self._others = own[1:]
        return str(cards[0]["id"])

    def _dim(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)


def sse_events(lines: Iterator[str]) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yield the `id` of each server-sent event, None without one, and the JSON of its data, until `[DONE]`."""
    number = None
    for line in lines:
        if line.startswith("id:"):
            number = line.removeprefix("id:").strip()
        data = event_data(line)
        if data == DONE:
            return
        if data is not None:
            yield number, json.loads(data)


def _refused_param(response: httpx.Response) -> str | None:
    """Return the field or header that a refusal names."""
    try:
        found = response.json()["error"]["param"]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


def _refusal(response: httpx.Response) -> str:
    hint = " (here: --api-key or SQUADRON_API_KEY)" if response.status_code == 401 else ""
    try:
        return str(response.json()["error"]["message"]) + hint
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code} {response.reason_phrase}"


def _typed(console: Console) -> Iterator[str]:
    """Yield what is typed, with editing and history where Python has readline, until Ctrl-D or Ctrl-C."""
    while True:
        try:
            yield console.input("[bold green]>[/] ")
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
