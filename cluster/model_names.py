"""Short names for models: installed packages offer folders under the entry-point group `squadron.models`."""

from __future__ import annotations

import os
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from engine.config import split_revision
from engine.errors import ConfigError

GROUP = "squadron.models"


def known_models() -> tuple[str, ...]:
    """Names that installed packages offer, sorted; `demo` is Squadron's own."""
    return tuple(sorted({entry.name for entry in entry_points(group=GROUP)}))


def resolve_model(name: str) -> str:
    """Turn what the user wrote into an absolute folder, or leave it as a hub id.

    name: may end with @ and the revision of a hub id. A registered name wins over a folder of that name in the
    working directory: `./demo` means the folder. Raises `ConfigError` (flag "model") where a path is given that is no
    folder, or a registered name cannot be had, and (flag "revision") where a folder is given with a revision.
    """
    registered = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name in registered:
        return _folder_of(registered[name])
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path.resolve())
    plain, revision = split_revision(name)
    if revision is not None and (plain in registered or Path(plain).expanduser().is_dir()):
        raise ConfigError(
            f"revision: {plain} is a folder, and only models of the hub have revisions; leave it out", "revision"
        )
    if _is_path(plain):
        raise ConfigError(f"model: there is no folder {name}; give a model folder, a hub id or {_choices()}", "model")
    return name


def _folder_of(entry: EntryPoint) -> str:
    try:
        folder = Path(entry.load()())
    except (ImportError, AttributeError, OSError) as error:
        raise ConfigError(f"model: {entry.name} ({entry.value}) cannot be had: {error}", "model") from error
    if not folder.is_dir():
        raise ConfigError(f"model: {entry.name} ({entry.value}) gave {folder}, which is no folder", "model")
    return str(folder.resolve())


def _is_path(name: str) -> bool:
    """Hub ids are `name` or `owner/name`; anything that only a path can be is meant as one."""
    return name.startswith((".", "~", os.sep)) or name.endswith(os.sep) or name.count("/") > 1


def _choices() -> str:
    return ", ".join(repr(name) for name in known_models()) or "install Squadron for 'demo'"
