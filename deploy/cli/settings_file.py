"""Settings of a file, `--config FILE`, and of the command line, which wins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from cluster.app_config import APP_WIDE, PER_MODEL, AppConfig, parse_app
from deploy.cli.vllm_flags import without_vllms
from engine.errors import ConfigError

SETTINGS = (*PER_MODEL, *APP_WIDE)


class _OnceLoader(yaml.SafeLoader):
    """Reads YAML whose mappings have each key once; the last one counted, whichever was meant."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping. Raises `ConstructorError`."""
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            seen.add(getattr(key, "value", None))
        return super().construct_mapping(node, deep)


def load_settings(path: Path) -> dict[str, Any]:
    """Read a YAML file of settings. Raises `ConfigError` naming the file where it is no mapping or not readable."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_OnceLoader)  # noqa: S506  a SafeLoader
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; give a YAML file of settings", "config"
        ) from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}", "config") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path}: must hold settings such as `replicas: 2`, one a line", "config")
    try:
        settings = without_vllms(values, SETTINGS)
        if isinstance(models := settings.get("models"), list):
            settings["models"] = [_of_one(i, entry) for i, entry in enumerate(models)]
        return settings
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", error.flag) from None


def _of_one(number: int, entry: Any) -> Any:
    """Return an entry of `models` as `without_vllms` does; what is none is refused where all are read."""
    if not isinstance(entry, dict) or not all(isinstance(key, str) for key in entry):
        return entry
    try:
        return without_vllms(entry, SETTINGS)
    except ConfigError as error:
        raise ConfigError(f"models[{number}]: {error}", error.flag) from None


def merge_settings(path: Path | None, chosen: Mapping[str, Any]) -> AppConfig:
    """Return the configuration of file and command line, which wins: over each of `models`, too.

    Raises `ConfigError`.
    """
    loaded = {} if path is None else load_settings(path)
    try:
        return parse_app(_overridden(loaded, chosen))
    except ConfigError as error:
        in_file = error.flag in loaded or "models" in loaded
        if path is not None and in_file and error.flag not in chosen:
            raise ConfigError(f"{path}: {error}", error.flag) from None
        raise


def _overridden(loaded: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    values = {**loaded, **chosen}
    if isinstance(models := values.get("models"), list):
        values["models"] = [_without(entry, chosen) if isinstance(entry, dict) else entry for entry in models]
    return values


def _without(entry: Mapping[Any, Any], chosen: Mapping[str, Any]) -> dict[Any, Any]:
    return {key: value for key, value in entry.items() if str(key).replace("-", "_") not in chosen}
