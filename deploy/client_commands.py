"""Commands that ask a server which runs: `chat`, `status`, `top` and `why`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from deploy.serve.environment import Environment

LOCAL = "http://127.0.0.1:8000"
ServerUrl = Annotated[str, typer.Option("--url", "--address", help="Where the server listens.")]
ServerKey = Annotated[
    str | None, typer.Option("--api-key", help="The server's key.", show_default="$SQUADRON_API_KEY, else none")
]


def chat(
    url: ServerUrl = LOCAL,
    model: Annotated[
        str | None, typer.Option("--model", "--model-name", help="Model id.", show_default="the server's first")
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", "--system-prompt", help="A system message to begin with.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of one answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, max=100.0, help="0 = always the most likely token.")] = 0.7,
    quick: Annotated[str | None, typer.Option("--quick", "-q", help="Send this message alone, and stop.")] = None,
    api_key: ServerKey = None,
) -> None:
    """Chat with a served model in the terminal. /clear clears the conversation, /exit ends it.

    Lines from a pipe are messages, too.
    """
    from deploy.cli.chat import Chat, ChatOptions

    key = api_key or Environment.read().api_key
    talk = Chat(ChatOptions(url, model, system, max_tokens, temperature, key))
    if not (talk.run(sys.stdin) if quick is None else talk.send(quick)):
        raise typer.Exit(1)


def status(
    url: ServerUrl = LOCAL,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Repeat until Ctrl-C.")] = False,
    api_key: ServerKey = None,
) -> None:
    """Show a server's replicas, their load, and why a replica does not serve.

    Exit code: 0 = ready, 1 = not ready, 2 = no answer, 3 = the key is refused. Needs no Ray on this machine.
    """
    from deploy.status import show_status

    raise typer.Exit(show_status(url, api_key or Environment.read().api_key, as_json, watch))


def top(
    url: ServerUrl = LOCAL,
    interval: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between two probes.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Read twice, an interval apart, print, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per interval.")] = False,
    api_key: ServerKey = None,
) -> None:
    """Show live requests, tokens, latencies, replicas and tenants of a server. Ctrl-C ends it.

    Rates and percentiles are those of the last interval, over all routers that answered. Exit code:
    0 = ready, 1 = not ready, 2 = no answer, 3 = the key is refused. Needs no Ray on this machine.
    """
    from deploy.top.command import show_top

    raise typer.Exit(show_top(url, api_key or Environment.read().api_key, interval, once, as_json))


def why(
    request_id: Annotated[str, typer.Argument(help="The `id` in its answer, such as chatcmpl-...")],
    url: ServerUrl = LOCAL,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    api_key: ServerKey = None,
) -> None:
    """Show what a request waits or waited for: its turn, a replica, token budget, KV blocks, preemption, migration.

    Exit code: 0 = found, 1 = unknown request, 2 = no answer, 3 = the key is refused. Needs no Ray on this machine.
    """
    from deploy.cli.why import show_why

    raise typer.Exit(show_why(url, api_key or Environment.read().api_key, request_id, as_json))
