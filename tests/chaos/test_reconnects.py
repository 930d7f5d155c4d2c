"""The proxy dies, or processes that keep an answer do: clients fetch the rest, and get what they would have had."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
from rich.console import Console

from deploy.cli.chat import Chat, ChatOptions
from tests.e2e.harness import App, eventually, kill, proxy_processes, replica_processes, router_processes

GUIDE = Path(__file__).parents[2] / "docs/guides/reconnecting.md"
CLIENTS, TOKENS = 32, 150
MORE = {"ignore_eos": True}


def example(app: App) -> str:
    """The client of the guide, at the app, with an answer of known length."""
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    more = f"background=True, temperature=0, max_output_tokens={TOKENS}, extra_body={MORE!r}"
    return code.replace("http://127.0.0.1:8000", app.url).replace("background=True", more)


def run(code: str, heard: Callable[[], None] = lambda: None) -> list[str]:
    """Return what the client of the guide prints."""
    printed: list[str] = []

    def show(text: str, **_: Any) -> None:
        printed.append(text)
        heard()

    exec(compile(code, str(GUIDE), "exec"), {"print": show})
    return printed


def test_the_example_goes_on_behind_the_last_event_when_the_proxy_is_killed(demo_app: App) -> None:
    code = example(demo_app)
    whole = "".join(run(code))
    half, count, lock = threading.Event(), 0, threading.Lock()

    def heard() -> None:
        nonlocal count
        with lock:
            count += 1
        if count == CLIENTS * TOKENS // 4:
            half.set()

    found: list[list[str]] = []
    threads = [threading.Thread(target=lambda: found.append(run(code, heard))) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    assert half.wait(120)
    victim = proxy_processes()[0]
    kill(victim)
    for thread in threads:
        thread.join(180)
    again = [printed.count(" [reconnecting] ") for printed in found]
    answers = [[part for part in printed if part != " [reconnecting] "] for printed in found]
    print(f"{len(found)} of {CLIENTS} finished, after {sorted(again)} reconnects")
    assert len(found) == CLIENTS
    assert all("".join(parts) == whole for parts in answers)
    assert any(again), "all was answered before the kill"
    demo_app.wait_whole()


def test_a_background_response_outlives_its_router_and_a_replica(demo_app: App) -> None:
    asked: dict[str, Any] = {"model": "demo", "input": "Once", "temperature": 0, "max_output_tokens": 300}
    with openai.OpenAI(base_url=f"{demo_app.url}/v1", api_key="none", max_retries=20, timeout=60) as client:
        whole = client.responses.create(**asked, extra_body=MORE)
        begun = client.responses.create(**asked, background=True, extra_body=MORE)
        for number, _ in enumerate(client.responses.retrieve(begun.id, stream=True)):
            if number == 40:
                break
        kill(router_processes()[0])
        kill(replica_processes()[0])

        def ended() -> bool:
            found = client.responses.retrieve(begun.id)
            return found.status == "incomplete" and found.output_text == whole.output_text

        eventually(ended, "the response is whole", 90)
    demo_app.wait_whole()
    eventually(lambda: demo_app.metric("squadron_kv_cache_usage_perc") == 0, "all blocks are free")


def test_a_chat_with_a_key_goes_on_when_the_proxy_is_killed(demo_app: App) -> None:
    asked = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Once"}],
        "stream": True,
        "max_tokens": 300,
        "temperature": 1.0,
        "ignore_eos": True,
    }
    headers, events, killed = {"Idempotency-Key": "a chat"}, list[str](), False
    with httpx.Client(base_url=demo_app.url, timeout=60) as client:
        path = "/v1/chat/completions"

        def finished() -> bool:
            nonlocal killed
            try:
                with client.stream("POST", path, json=asked, headers=headers) as answer:
                    if answer.status_code != 200:
                        return False
                    for line in answer.iter_lines():
                        if line.startswith("id: "):
                            headers["Last-Event-ID"] = line.removeprefix("id: ")
                        elif line.startswith("data: "):
                            events.append(line)
                        if len(events) == 30 and not killed:
                            killed = True
                            kill(proxy_processes()[0])
            except httpx.TransportError:
                return False
            return events[-1] == "data: [DONE]"

        eventually(finished, "the chat is whole", 90)
        headers.pop("Last-Event-ID")
        again = client.post(path, json=asked, headers=headers).text
    assert [line for line in again.splitlines() if line.startswith("data: ")] == events
    demo_app.wait_whole()


def test_squadron_chat_shows_that_it_reconnects_when_the_proxy_is_killed(demo_app: App) -> None:
    class Terminal(io.StringIO):
        """Where the chat writes; the proxy is killed after some of it."""

        writes = 0

        def write(self, text: str) -> int:
            self.writes += 1
            if self.writes == 12:
                kill(proxy_processes()[0])
            return super().write(text)

    terminal = Terminal()
    # What is drawn at random is over by then now and then.
    options = ChatOptions(demo_app.url, max_tokens=400, temperature=0)
    assert Chat(options, Console(file=terminal, width=200)).run(io.StringIO("def main():\n"))
    shown = terminal.getvalue()
    assert "[connection lost: " in shown
    assert "[reconnected: the answer goes on]" in shown
    assert " tokens" in shown.splitlines()[-1]
    demo_app.wait_whole()
