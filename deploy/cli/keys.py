"""`squadron keys`: entries for the file of `--api-key-file`, and what `squadron serve` needs of that file."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer
import yaml

from cluster.admission.key_file import KeyFile, parse_keys
from cluster.admission.keys import hash_key, new_key
from cluster.app_config import AppConfig
from cluster.config import ClusterConfig
from engine.errors import ConfigError, flag

keys = typer.Typer(name="keys", help="API keys.", no_args_is_help=True)


@keys.callback()
def about() -> None:
    """API keys for the file of `squadron serve --api-key-file`."""


@keys.command()
def new(
    tenant: Annotated[str, typer.Option(help="Owner of the key; keys of one tenant share quotas and cache.")],
    expires: Annotated[str | None, typer.Option(help="Expiry, such as 2027-01-31T12:00:00Z.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Requests per minute.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="Tokens per minute, prompt and output.")] = None,
    max_concurrent: Annotated[int | None, typer.Option(help="Concurrent requests.")] = None,
    max_stored_bytes: Annotated[int | None, typer.Option(help="Bytes of all files at /v1/files.")] = None,
    admin: Annotated[
        bool, typer.Option("--admin", help="The key sees all tenants: metrics, replicas, `squadron why`.")
    ] = False,
    scrape: Annotated[
        bool, typer.Option("--scrape", help="The key reads all metrics at /metrics and /ready, and nothing else.")
    ] = False,
    save_key: Annotated[
        Path | None, typer.Option(help="A new file for the key itself, which is then not shown.", show_default=False)
    ] = None,
) -> None:
    """Make a random key. stderr shows the key once; stdout gets its entry for the key file, with its hash only.

    `squadron keys new --tenant team-a >> keys.yaml` adds the key to the file.
    """
    if admin and scrape:
        raise ConfigError("--admin and --scrape exclude each other: an admin's key may scrape, too", "scrape")
    key = new_key()
    entry = {
        "tenant": tenant,
        "key_sha256": hash_key(key).hex(),
        "expires": expires,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrent": max_concurrent,
        "max_stored_bytes": max_stored_bytes,
        "admin": admin or None,
        "scrape": scrape or None,
    }
    text = yaml.safe_dump([{name: value for name, value in entry.items() if value is not None}], sort_keys=False)
    try:
        parse_keys(text, "the new key")
    except ConfigError as error:
        said = str(error).partition(": ")[2]  # without the line
        name = re.split(r"\W", said, maxsplit=1)[0]
        raise ConfigError(f"{flag(name)}{said[len(name) :]}", name) from None
    if save_key is None:
        print(f"The key, shown this once: {key}", file=sys.stderr)
    else:
        _save(key, save_key)
    print(text, end="")


def _save(key: str, path: Path) -> None:
    """Write a key to a file of the user's alone. Raises `ConfigError` where it is there or cannot be written."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(key)
    except FileExistsError:
        raise ConfigError(f"--save-key: {path} is there already; give a new file", "save_key") from None
    except OSError as error:
        raise ConfigError(f"--save-key: {path} cannot be written: {error.strerror}", "save_key") from error


def with_key_file(app: AppConfig, local: bool) -> AppConfig:
    """Return `app` ready to serve with its key file, if it has one.

    The path is made absolute, and the command gets a key of its own, unless one is set, to see the replicas.
    local: routers run on this machine, so that the file can be checked now. Raises `ConfigError`.
    """
    config = app.shared
    if config.api_key_file is None:
        return app
    path = Path(config.api_key_file).absolute()
    if local:
        KeyFile(path)
    return app.with_shared(api_key_file=str(path), metrics_key=config.metrics_key or new_key())


def own_key(config: ClusterConfig) -> str | None:
    """Return the key with which `squadron serve` reads /ready of its own server; None without keys."""
    return config.metrics_key or config.api_key
