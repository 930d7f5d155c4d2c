"""The `squadron` command.

Commands import what they need when they run: Ray and torch take seconds, which `--help` must not wait for.
"""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from deploy.batch.flags import BatchCommand, batch
from deploy.capacity.flags import plan
from deploy.cli.flags import OF_A_SERVICE, PLANNED, ServeCommand, all_but, in_flags, merge_settings, with_settings
from deploy.cli.keys import keys, with_key_file
from deploy.serve.batch_dir import with_batch_dir
from deploy.serve.environment import Environment, prepare_local_ray, prepare_ray
from deploy.serve.haproxy import prepare_haproxy
from engine.errors import SquadronError
from parallel.errors import ParallelError, ShardingError

LOCAL = "http://127.0.0.1:8000"
ServerUrl = Annotated[str, typer.Option("--url", "--address", help="Where the server listens.")]
ServerKey = Annotated[
    str | None, typer.Option("--api-key", help="The server's key.", show_default="$SQUADRON_API_KEY, else none")
]
WIDE = 110  # columns; in fewer, typer's tables of help cut the names of flags short
app = typer.Typer(
    name="squadron",
    help="Serve large language models on Ray, so that every token survives.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich" if shutil.get_terminal_size().columns >= WIDE else None,
)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


def print_versions(wanted: bool) -> None:
    """Print a line for each of what makes this installation, and stop, if that is wanted."""
    if wanted:
        for name in ("squadron", "ray", "torch", "transformers"):
            print(f"{name} {installed_version(name)}")
        raise typer.Exit


@app.callback()
def options(
    versions: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=print_versions, help="Print versions and stop.")
    ] = False,
) -> None:
    """Serve large language models on Ray, so that every token survives."""


@app.command(cls=ServeCommand)
@with_settings
def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A folder, a hub id, or 'demo'. May stand in --config instead, as `model:` or in `models:`."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file of settings, named as the flags; the command line wins."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check model and settings, print what would run and where, and stop."),
    ] = False,
    wait_for_nodes: Annotated[
        bool,
        typer.Option("--wait-for-nodes", help="In a cluster too small now, wait for nodes (autoscaling)."),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show Ray's and Serve's own logs.")] = False,
    **chosen: Any,
) -> None:
    """Serve MODEL over an OpenAI-compatible endpoint.

    Starts Ray on this machine, or joins the cluster that RAY_ADDRESS names ("auto" finds one started by `ray start`).
    Ctrl-C stops everything that was started; a second Ctrl-C does not wait for running streams.
    """
    environment = Environment.read()
    if model is not None:
        chosen["model"] = model
    if environment.api_key is not None:
        chosen.setdefault("api_key", environment.api_key)
    if environment.metrics_key is not None:
        chosen.setdefault("metrics_key", environment.metrics_key)
    settings = merge_settings(config, chosen)
    with_keys = with_key_file(with_batch_dir(settings), local=environment.ray_address is None)
    if dry_run:
        from deploy.cli.dry_run import describe_plans, make_plans

        print(describe_plans(settings, make_plans(settings)))
        return
    ray_address = prepare_ray(environment.ray_address)
    with_haproxy = ray_address is None and with_keys.shared.ingress == "haproxy"
    haproxy = prepare_haproxy(with_keys.shared) if with_haproxy else None
    try:
        from deploy.serve.command import Options, serve_app

        serve_app(with_keys, Options(ray_address, wait_for_nodes, verbose, haproxy))
    finally:
        if haproxy is not None:
            haproxy.remove()


app.add_typer(keys)
app.command("batch", cls=BatchCommand)(with_settings(batch, OF_A_SERVICE))
app.command("plan", cls=ServeCommand)(with_settings(plan, all_but(PLANNED)))


@app.command()
def chat(
    url: ServerUrl = LOCAL,
    model: Annotated[str | None, typer.Option(help="Model id.", show_default="the first that the server has")] = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, max=100.0, help="0 = always the likeliest token.")] = 0.7,
    api_key: ServerKey = None,
) -> None:
    """Chat with a served model in the terminal. /clear forgets the conversation, /exit ends it.

    Lines can also be piped in: each is one message.
    """
    from deploy.cli.chat import Chat, ChatOptions

    key = api_key or Environment.read().api_key
    if not Chat(ChatOptions(url, model, system, max_tokens, temperature, key)).run(sys.stdin):
        raise typer.Exit(1)


@app.command()
def status(
    url: ServerUrl = LOCAL,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until Ctrl-C.")] = False,
    api_key: ServerKey = None,
) -> None:
    """Say how a server is: its replicas, their load, and what keeps those from serving that do not.

    Exit code: 0 = ready, 1 = not ready, 2 = it cannot be asked. Needs no Ray on this machine.
    """
    from deploy.status.command import show_status

    raise typer.Exit(show_status(url, api_key or Environment.read().api_key, as_json, watch))


@app.command()
def top(
    url: ServerUrl = LOCAL,
    interval: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look twice, an interval apart, print, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each look.")] = False,
    api_key: ServerKey = None,
) -> None:
    """Show what a server does, as it does it: requests, tokens, latencies, replicas, tenants. Ctrl-C ends it.

    Rates and percentiles are those of the last interval, over all routers that let themselves be met. Exit code:
    0 = ready, 1 = not ready, 2 = it cannot be asked. Needs no Ray on this machine.
    """
    from deploy.top.command import show_top

    raise typer.Exit(show_top(url, api_key or Environment.read().api_key, interval, once, as_json))


@app.command()
def doctor(
    host: Annotated[str, typer.Option(help="Address that the server is to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Its port.")] = 8000,
    grpc_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Its gRPC port.", show_default="none")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Look whether this machine is fit to serve: each line ok, a warning, or what to fix and how.

    Looks at versions, shadowed packages, the Ray cluster of RAY_ADDRESS, GPUs, NCCL, ports, shared memory, open
    files, disks and the hub. Exit code: 1 = something must be fixed.
    """
    from deploy.doctor.command import Where, all_checks, run_doctor

    checks = all_checks(Where(host, port, grpc_port), Environment.read())
    raise typer.Exit(run_doctor(checks, as_json))


@app.command()
def why(
    request_id: Annotated[str, typer.Argument(help="The `id` of its answer, such as chatcmpl-...")],
    url: ServerUrl = LOCAL,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    api_key: ServerKey = None,
) -> None:
    """Say what a request waits or waited for: its turn, a replica, token budget, KV blocks, preemption, migration.

    Exit code: 0 = it is told, 1 = nothing is known of it, 2 = the server cannot be asked. Needs no Ray here.
    """
    from deploy.cli.why import show_why

    raise typer.Exit(show_why(url, api_key or Environment.read().api_key, request_id, as_json))


@app.command("demo-failover")
def demo_failover(
    kills: Annotated[int | None, typer.Option(min=1, help="Stop after so many kills.")] = None,
    seconds: Annotated[float | None, typer.Option(min=1, help="Stop after so many seconds.")] = None,
    every: Annotated[float, typer.Option(min=0, help="Seconds from when all replicas serve to the next kill.")] = 5.0,
    streams: Annotated[int, typer.Option(min=1, max=64, help="Streams at a time.")] = 8,
    replicas: Annotated[int, typer.Option(min=1, help="Copies of the model.")] = 2,
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", "-tp", min=1, help="Ranks of each.")
    ] = 1,
    tokens: Annotated[int, typer.Option(min=16, max=1500, help="Tokens of one answer.")] = 300,
    seed: Annotated[int, typer.Option(help="Which replicas are killed.")] = 0,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show Ray's and Serve's own logs.")] = False,
) -> None:
    """Watch streams survive: serves the demo model here, and kills its replicas (kill -9) while streams run.

    Each answer is compared with the one that was given before the first kill. Ends at Ctrl-C, or by --kills or
    --seconds. Exit code: 0 only if replicas were killed and every answer was exact.
    """
    prepare_local_ray()
    from deploy.failover.command import FailoverOptions
    from deploy.failover.command import demo_failover as run

    options = FailoverOptions(streams, replicas, tensor_parallel_size, tokens, kills, seconds, every, seed, verbose)
    raise typer.Exit(run(options))


@app.command()
def version() -> None:
    """Print the version of Squadron and of what it runs on."""
    print_versions(True)


def main() -> None:
    """Run the command; what Squadron refuses on purpose is one sentence and exit code 1."""
    try:
        app()
    except (SquadronError, ParallelError) as error:
        errors.print(Text.assemble(("Error: ", "bold red"), explain(error)))
        raise SystemExit(1) from None


def explain(error: Exception) -> str:
    """Return one sentence that names the flag to change, where there is one."""
    hint = "; change --tensor-parallel-size" if isinstance(error, ShardingError) else ""
    return in_flags(" ".join(str(error).split())) + hint
