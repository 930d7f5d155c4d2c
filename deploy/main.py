"""The `squadron` command: its subcommands, and the flags of those that have no file of their own for them."""

from __future__ import annotations

import shutil
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from deploy.batch.flags import BatchCommand, batch
from deploy.capacity.flags import plan
from deploy.cli.flags import (
    OF_A_SERVICE,
    PLANNED,
    ServeCommand,
    SettingsCommand,
    all_but,
    in_flags,
    with_settings,
)
from deploy.cli.keys import keys
from deploy.cli.vllm_commands import SquadronCommands
from deploy.client_commands import chat, status, top, why
from deploy.serve.environment import AUTO, Environment, check_inherited, prepare_local_ray, prepare_ray
from deploy.serve.flags import serve
from engine.errors import SquadronError
from parallel.errors import ParallelError, ShardingError

WIDE = 110  # columns; in fewer, typer's tables of help cut the names of flags short
app = typer.Typer(
    name="squadron",
    cls=SquadronCommands,
    help="Serve large language models on Ray, so that every token survives.",
    context_settings={"help_option_names": ["--help", "-h"]},
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
        bool, typer.Option("-v", "--version", is_eager=True, callback=print_versions, help="Print versions and stop.")
    ] = False,
) -> None:
    """Serve large language models on Ray, so that every token survives."""


app.command("serve", cls=ServeCommand)(with_settings(serve))
app.add_typer(keys)
app.command("batch", cls=BatchCommand)(with_settings(batch, OF_A_SERVICE))
app.command("plan", cls=SettingsCommand)(with_settings(plan, all_but(PLANNED)))
app.command()(chat)
app.command()(status)
app.command()(top)


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


app.command()(why)


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
