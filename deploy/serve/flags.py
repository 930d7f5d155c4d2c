"""The flags of `squadron serve`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.app_config import AppConfig
from cluster.batch.io.paths import is_url, local_path
from cluster.config_values import GATEWAY, SERVE
from deploy.cli.keys import with_key_file
from deploy.cli.processes import Interrupts
from deploy.cli.settings_file import merge_settings
from deploy.cli.vllm_commands import API_KEY, VARIABLES, variable_notes
from deploy.serve.environment import API_KEY as OWN_KEY
from deploy.serve.environment import Environment, check_inherited, prepare_ray
from deploy.serve.fork_server import fork_server
from engine.errors import ConfigError


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
    _tell_of_variables(environment, settings)
    with_keys = with_key_file(_with_batch_dir(settings), local=own_ray)
    if own_ray:
        check_inherited()
    if dry_run:
        from deploy.cli.dry_run import describe_plans, make_plans

        print(describe_plans(settings, make_plans(settings)))
        return
    ray_address = prepare_ray(environment.ray_address)
    with Interrupts() as interrupts, ExitStack() as undo:
        # First of all, as what it imports takes seconds: meanwhile this process imports Ray and starts it.
        forks = fork_server() if own_ray else None
        if forks is not None:
            undo.callback(forks.close)
        from deploy.serve.command import Options, serve_app

        serve_app(with_keys, Options(ray_address, wait_for_nodes, verbose, forks), interrupts)


def _tell_of_variables(environment: Environment, app: AppConfig) -> None:
    """Say which variables of vLLM's are not read, and which names are nearly ours.

    Raises `ConfigError` where one was to close a server that is left open.
    """
    if API_KEY in environment.of_vllm and not app.shared.keyed:
        raise ConfigError(f"{API_KEY} is not read, and the server would be open: {VARIABLES[API_KEY]}", "api_key")
    for name, meant in environment.misspelt:
        if meant == OWN_KEY and not app.shared.keyed:
            raise ConfigError(
                f"{name} is not read, and the server would be open: set {meant}, or unset it", "api_key"
            )
        typer.echo(f"{name} is not read: the variable is {meant}.", err=True)
    for note in variable_notes(environment.of_vllm):
        typer.echo(note, err=True)


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
