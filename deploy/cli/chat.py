"""`squadron chat`: a conversation in the terminal, streamed from any OpenAI-compatible server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO

import httpx
from rich.console import Console

from deploy.cli.client import DONE, event_data, key_headers, server_url
from engine.errors import SquadronError

with suppress(ImportError):  # Windows has none
    import readline  # noqa: F401  # importing it is what gives `input` line editing and history

# A model may think for long before its first token; only connecting has a short limit.
TIMEOUT = httpx.Timeout(connect=5.0, read=600.0, write=30.0, pool=5.0)


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
    """One finished answer. seconds: from the first token to the last."""

    text: str = ""
    tokens: int = 0
    seconds: float = 0.0
    first_token: float = 0.0
    finish_reason: str | None = None

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
            self._dim("stopped")
        except (ChatError, httpx.HTTPError) as error:
            self._console.print(f"\nError: {error or type(error).__name__}", style="red", markup=False)
            self._messages.pop()
            self._unanswered += 1
            return
        self._messages.append({"role": "assistant", "content": answer.text})

    def _stream(self, answer: ChatAnswer) -> None:
        began = time.perf_counter()
        with self._client.stream("POST", "/v1/chat/completions", json=self._body()) as response:
            if response.status_code != 200:
                response.read()
                raise ChatError(_refusal(response))
            for event in sse_events(response.iter_lines()):
                self._take_event(event, answer, time.perf_counter() - began)
        if answer.finish_reason is None:
            raise ChatError("the answer broke off: the server ended the stream without saying why")
        self._console.print()
        self._dim(answer.speed)

    def _take_event(self, event: dict[str, Any], answer: ChatAnswer, elapsed: float) -> None:
        if "error" in event:
            raise ChatError(str(event["error"].get("message", event["error"])))
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


def sse_events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON of each `data:` line of a server-sent event stream until `[DONE]`."""
    for line in lines:
        data = event_data(line)
        if data == DONE:
            return
        if data is not None:
            yield json.loads(data)


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
