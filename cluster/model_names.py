"""Short names for models: installed packages offer folders under the entry-point group `squadron.models`."""

from __future__ import annotations

import os
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from engine.errors import ConfigError

GROUP = "squadron.models"


def known_models() -> tuple[str, ...]:
    """Names that installed packages offer, sorted; `demo` is Squadron's own."""
    return tuple(sorted({entry.name for entry in entry_points(group=GROUP)}))


def resolve_model(name: str) -> str:
    """Turn what the user wrote into an absolute folder, or leave it as a hub id.

    A registered name wins over a folder of that name in the working directory: `./demo` means the folder.
    Raises `ConfigError` (flag "model") where a path is given that is no folder, or a registered name cannot be had.
    """
    found = {entry.name: entry for entry in entry_points(group=GROUP)}.get(name)
    if found is not None:
        return _folder_of(found)
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path.resolve())
    if _is_path(name):
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
