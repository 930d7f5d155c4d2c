"""The `squadron` command: its subcommands and their flags."""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from cluster.app_config import AppConfig
from cluster.batch.io.paths import is_url, local_path
from cluster.config_values import GATEWAY, HAPROXY, SERVE
from deploy.batch.flags import BatchCommand, batch
from deploy.cli.flags import (
    OF_A_SERVICE,
    PLANNED,
    ServeCommand,
    SettingsCommand,
    all_but,
    in_flags,
    merge_settings,
    seconds,
    with_settings,
)
from deploy.cli.keys import keys, with_key_file
from deploy.serve.environment import AUTO, Environment, check_inherited, prepare_local_ray, prepare_ray
from deploy.serve.fork_server import fork_server
from deploy.serve.haproxy import prepare_haproxy
from engine.errors import ConfigError, SquadronError
from parallel.errors import ParallelError, ShardingError

LOAD = "Load"
USUAL_INPUT = "1024, or what the context allows"
USUAL_OUTPUT = "256, or what the context allows"
USUAL_SHARE = "as measured on an H100: 0.85 of bandwidth, 0.59 of operations"
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
            help="A folder, a hub id, or 'demo'. --config may give it instead, as `model:` or in `models:`."
        ),
    ] = None,
    model_flag: Annotated[str | None, typer.Option("--model", help="The same as MODEL.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file of settings, named as the flags; the command line overrides it."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check model and settings, print the placement, and stop."),
    ] = False,
    wait_for_nodes: Annotated[
        bool,
        typer.Option("--wait-for-nodes", help="Wait for nodes if the cluster is too small (autoscaling)."),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show Ray's and Serve's own logs.")] = False,
    **chosen: Any,
) -> None:
    """Serve MODEL over an OpenAI-compatible endpoint.

    Starts Ray on this machine, or joins the cluster that RAY_ADDRESS names ("auto" finds one started by `ray start`).
    Ctrl-C stops everything that was started; a second Ctrl-C does not wait for running streams.
    """
    environment = Environment.read()
    if None not in (model, model_flag) and model != model_flag:
        raise ConfigError(f"model is {model!r} and --model {model_flag!r}: give one of them", "model")
    if (either := model or model_flag) is not None:
        chosen["model"] = either
    own_ray = environment.ray_address is None
    settings = merge_settings(config, _keys_of(environment) | chosen).behind(GATEWAY if own_ray else SERVE)
    with_keys = with_key_file(_with_batch_dir(settings), local=own_ray)
    if own_ray:
        check_inherited()
    if dry_run:
        from deploy.cli.dry_run import describe_plans, make_plans

        print(describe_plans(settings, make_plans(settings)))
        return
    ray_address = prepare_ray(environment.ray_address)
    with_haproxy = own_ray and with_keys.shared.ingress == HAPROXY
    haproxy = prepare_haproxy(with_keys.shared) if with_haproxy else None
    # First of all, as what it imports takes seconds: meanwhile this process imports Ray and starts it.
    forks = fork_server() if own_ray else None
    try:
        from deploy.serve.command import Options, serve_app

        serve_app(with_keys, Options(ray_address, wait_for_nodes, verbose, haproxy, forks))
    finally:
        if forks is not None:
            forks.close()
        if haproxy is not None:
            haproxy.remove()


def _keys_of(environment: Environment) -> dict[str, Any]:
    """Return the settings of keys that the environment gives; flags override them."""
    keys = {"api_key": environment.api_key, "metrics_key": environment.metrics_key}
    return {name: key for name, key in keys.items() if key is not None}


def _with_batch_dir(app: AppConfig) -> AppConfig:
    """Return `app` with the path of its `--batch-dir` made absolute, if it has one that is no URL."""
    place = app.shared.batch_dir
    if place is None or is_url(place):
        return app
    return app.with_shared(batch_dir=str(Path(local_path(place)).absolute()))


def plan(
    model: Annotated[str, typer.Argument(help="A folder, a hub id, or 'demo'; only its config is read.")],
    gpu: Annotated[
        str,
        typer.Option(help="Kind of GPU, such as H200, or auto for the cheapest; an unknown name lists all kinds."),
    ],
    gpu_prices: Annotated[
        str | None,
        typer.Option(
            help="What a GPU costs an hour, such as H100=2.5,L4=0.7, in any currency; --gpu auto compares these.",
            show_default="none: --gpu auto compares GPU memory",
        ),
    ] = None,
    input_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt.", show_default=USUAL_INPUT, rich_help_panel=LOAD)
    ] = None,
    output_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of an answer.", show_default=USUAL_OUTPUT, rich_help_panel=LOAD)
    ] = None,
    rps: Annotated[float | None, typer.Option(help="Requests per second at the peak.", rich_help_panel=LOAD)] = None,
    ttft: Annotated[
        float | None,
        typer.Option(
            help="Maximum seconds to the first token, on average.",
            parser=seconds,
            metavar="<float>",
            rich_help_panel=LOAD,
        ),
    ] = None,
    tpot: Annotated[
        float | None,
        typer.Option(
            help="Maximum seconds between two tokens, on average.",
            parser=seconds,
            metavar="<float>",
            rich_help_panel=LOAD,
        ),
    ] = None,
    headroom: Annotated[
        float, typer.Option(help="Share of a replica's rate that is kept free for bursts.", rich_help_panel=LOAD)
    ] = 0.2,
    spare_replicas: Annotated[
        int, typer.Option(help="Replicas that may be lost at the peak.", rich_help_panel=LOAD)
    ] = 1,
    roofline_share: Annotated[
        float | None,
        typer.Option(
            help="Share of the data sheets' speed to expect.", show_default=USUAL_SHARE, rich_help_panel=LOAD
        ),
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Also run the load through the scheduler, in virtual time.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    **chosen: Any,
) -> None:
    """Show what MODEL needs of GPUs: memory, tokens that fit, times, replicas for a load. Needs no GPU.

    Exit code: 0 = it fits; 1 = it does not, and the nearest settings that fit are printed.
    """
    from deploy.capacity.load import Wanted
    from deploy.capacity.plan import Shown, show_plan

    wanted = Wanted(input_len, output_len, rps, ttft, tpot, roofline_share, headroom, spare_replicas)
    show_plan({"model": model, **chosen}, gpu, wanted, Shown(as_json, gpu_prices, simulate))


app.add_typer(keys)
app.command("batch", cls=BatchCommand)(with_settings(batch, OF_A_SERVICE))
app.command("plan", cls=SettingsCommand)(with_settings(plan, all_but(PLANNED)))


@app.command()
def chat(
    url: ServerUrl = LOCAL,
    model: Annotated[str | None, typer.Option(help="Model id.", show_default="the server's first")] = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of one answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, max=100.0, help="0 = always the most likely token.")] = 0.7,
    api_key: ServerKey = None,
) -> None:
    """Chat with a served model in the terminal. /clear clears the conversation, /exit ends it.

    Lines from a pipe are messages, too.
    """
    from deploy.cli.chat import Chat, ChatOptions

    key = api_key or Environment.read().api_key
    if not Chat(ChatOptions(url, model, system, max_tokens, temperature, key)).run(sys.stdin):
        raise typer.Exit(1)


@app.command()
def status(
    url: ServerUrl = LOCAL,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Repeat until Ctrl-C.")] = False,
    api_key: ServerKey = None,
) -> None:
    """Show a server's replicas, their load, and why a replica does not serve.

    Exit code: 0 = ready, 1 = not ready, 2 = no answer. Needs no Ray on this machine.
    """
    from deploy.status import show_status

    raise typer.Exit(show_status(url, api_key or Environment.read().api_key, as_json, watch))


@app.command()
def top(
    url: ServerUrl = LOCAL,
    interval: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between two probes.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Read twice, an interval apart, print, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per interval.")] = False,
    api_key: ServerKey = None,
) -> None:
    """Show live requests, tokens, latencies, replicas and tenants of a server. Ctrl-C ends it.

    Rates and percentiles are those of the last interval, over all routers that answered. Exit code:
    0 = ready, 1 = not ready, 2 = no answer. Needs no Ray on this machine.
    """
    from deploy.top.command import show_top

    raise typer.Exit(show_top(url, api_key or Environment.read().api_key, interval, once, as_json))


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="A folder, a hub id, or 'demo', with plain weights.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write; it must be empty or not there yet.")],
    quantization: Annotated[
        Literal["int4", "int8", "fp8"],
        typer.Option("--quantization", "-q", help="Type of the weights of linear layers."),
    ] = "int4",
    quantization_group_size: Annotated[
        int | None,
        typer.Option(help="Inputs that share a scale in int4; most engines take 32, 64, 128.", show_default="128"),
    ] = None,
) -> None:
    """Write MODEL to FOLDER with its linear layers quantised, as compressed-tensors, which other engines read, too.

    Rounds each weight to the nearest, as `squadron serve --quantization` does while it loads. Needs no GPU.
    """
    from deploy.cli.quantize import quantize_model

    quantize_model(model, folder, quantization, quantization_group_size)


@app.command()
def models(
    names: Annotated[
        list[str] | None, typer.Argument(help="Parts of an architecture or model_type, such as qwen3.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also the decoders of transformers that have no family here.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """Show which architectures are served, and what each can: split over ranks, quantised, cached.

    Each family is built without weights, so this takes some seconds. Fetches nothing.
    """
    from deploy.cli.models import show_models

    show_models(names or (), everything, as_json)


@app.command()
def doctor(
    model: Annotated[
        str | None, typer.Argument(help="Also check a model: a folder, a hub id, or 'demo'.", show_default="none")
    ] = None,
    host: Annotated[str, typer.Option(help="Address of the server.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Its port.")] = 8000,
    grpc_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Its gRPC port.", show_default="none")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check whether this machine can serve. Each line is ok, a warning, or what to fix and how.

    Checks versions, shadowed packages, the Ray cluster of RAY_ADDRESS, GPUs, their driver and links, NCCL,
    InfiniBand, locked memory, ports, shared memory, open files, the clock, disks and the hub; of MODEL, whether it is
    there, readable, fits, and is multiplied as it is held. Exit code: 1 = something must be fixed.
    """
    from deploy.doctor.command import Where, all_checks, run_doctor

    checks = all_checks(Where(host, port, grpc_port), Environment.read(), model)
    raise typer.Exit(run_doctor(checks, as_json))


@app.command()
def why(
    request_id: Annotated[str, typer.Argument(help="The `id` in its answer, such as chatcmpl-...")],
    url: ServerUrl = LOCAL,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    api_key: ServerKey = None,
) -> None:
    """Show what a request waits or waited for: its turn, a replica, token budget, KV blocks, preemption, migration.

    Exit code: 0 = found, 1 = unknown request, 2 = no answer. Needs no Ray on this machine.
    """
    from deploy.cli.why import show_why

    raise typer.Exit(show_why(url, api_key or Environment.read().api_key, request_id, as_json))


@app.command()
def drain(
    node: Annotated[
        str | None,
        typer.Argument(help="Its Ray id, address, host name or name.", show_default="all of this machine"),
    ] = None,
    deadline: Annotated[float, typer.Option(min=0, max=86_400, help="Seconds until it ends.")] = 120.0,
    address: Annotated[
        str | None,
        typer.Option(help="Address of the Ray cluster.", show_default="$RAY_ADDRESS, else the one that runs here"),
    ] = None,
) -> None:
    """Announce that a NODE ends soon, as a spot notice does: what runs there goes on elsewhere at once.

    Serve starts other replicas and routers, and stops those on the node. Exit code: 1 = it is not announced.
    """
    chosen = prepare_ray(address or Environment.read().ray_address or AUTO)
    from deploy.drain import drain_nodes

    drain_nodes(node, deadline, chosen)


@app.command()
def replay(
    files: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="Files of --record-incidents.")],
) -> None:
    """Run an incident again in a simulator: its requests, and the ends of links and processes where they were.

    Give the files of all routers. Exit code: 0 = each request ended once and no token was lost, else 1.
    """
    from deploy.cli.replay import replay as run

    raise typer.Exit(run(files))


@app.command("demo-failover")
def demo_failover(
    kills: Annotated[int | None, typer.Option(min=1, help="Stop after this many kills.")] = None,
    seconds: Annotated[float | None, typer.Option(min=1, help="Stop after this many seconds.")] = None,
    every: Annotated[
        float, typer.Option(min=0, help="Seconds between the moment when all replicas serve and the next kill.")
    ] = 5.0,
    streams: Annotated[int, typer.Option(min=1, max=64, help="Concurrent streams.")] = 8,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas of the model.")] = 2,
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", "-tp", min=1, help="Ranks of each replica.")
    ] = 1,
    tokens: Annotated[int, typer.Option(min=16, max=1500, help="Tokens of one answer.")] = 300,
    seed: Annotated[int, typer.Option(help="Seed of the choice of replicas to kill.")] = 0,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show Ray's and Serve's own logs.")] = False,
) -> None:
    """Serve the demo model here and kill its replicas (kill -9) while streams run.

    Each answer is compared with the one from before the first kill. Ctrl-C, --kills or --seconds end it. Exit code:
    0 only if replicas were killed and every answer was exact.
    """
    check_inherited()
    prepare_local_ray()
    from deploy.failover.command import FailoverOptions
    from deploy.failover.command import demo_failover as run

    options = FailoverOptions(streams, replicas, tensor_parallel_size, tokens, kills, seconds, every, seed, verbose)
    raise typer.Exit(run(options))


@app.command()
def version() -> None:
    """Print the versions of Squadron, Ray, torch and transformers."""
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
