"""The configuration of an app with one model or several: still one form, that of `ClusterConfig`.

With several, `models` lists what is set for each; what stands beside it holds for the app, or for all models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from cluster.config import ClusterConfig, ServedModelConfig, parse_config, refuse_unknown
from cluster.config_values import AUTO
from engine.errors import ConfigError

PER_MODEL = tuple(f.name for f in fields(ServedModelConfig))
APP_WIDE = tuple(f.name for f in fields(ClusterConfig) if f.name not in PER_MODEL)
OF_ONE = ("model", "served_model_name")  # what models cannot share


@dataclass(frozen=True, slots=True)
class AppConfig:
    """What an app serves.

    models: at least one, alike in all that concerns the app (`APP_WIDE`). listed: whether they came as `models`, so
    that others may join them later without disturbing these.
    """

    models: tuple[ClusterConfig, ...]
    listed: bool = False

    @property
    def shared(self) -> ClusterConfig:
        """Any of the models' configurations, to read what concerns the app."""
        return self.models[0]

    @property
    def names(self) -> tuple[str, ...]:
        """The models' ids, of each the first."""
        return tuple([config.model_id for config in self.models])

    def with_shared(self, **settings: Any) -> AppConfig:
        """Return a copy with other settings of the app."""
        return replace(self, models=tuple([replace(config, **settings) for config in self.models]))

    def behind(self, ingress: str) -> AppConfig:
        """Return a copy with `ingress` where the settings leave the choice (`auto`)."""
        return self if self.shared.ingress != AUTO else self.with_shared(ingress=ingress)

    def settings(self) -> dict[str, Any]:
        """Return what `parse_app` makes this of."""
        if not self.listed:
            return asdict(self.shared)
        shared = {name: getattr(self.shared, name) for name in APP_WIDE}
        return shared | {"models": [{name: getattr(one, name) for name in PER_MODEL} for one in self.models]}


def parse_app(values: Mapping[str, Any]) -> AppConfig:
    """Check settings that came from a file, the command line or Serve. Keys may use dashes or underscores.

    Raises `ConfigError` that names the setting, in `models` by its place: `models[1].tensor_parallel_size`.
    """
    app = _parsed_app(_plain_keys(values))
    # Here, not with each configuration: the app's parts get theirs without keys.
    if app.shared.enable_sleep_mode and not app.shared.keyed:
        raise ConfigError(
            "enable_sleep_mode: whoever may put replicas to sleep may stop the server; give --api-key or "
            "--api-key-file too",
            "enable_sleep_mode",
        )
    return app


def _parsed_app(settings: dict[str, Any]) -> AppConfig:
    if "models" not in settings:
        return AppConfig((parse_config(settings),))
    entries = _entries(settings.pop("models"))
    for key in settings:
        refuse_unknown(key, [f.name for f in fields(ClusterConfig)])
    for name in OF_ONE:
        if settings.get(name) is not None:
            raise ConfigError(f"{name} and models exclude each other: give each model its own {name}", name)
    configs = tuple([_parsed(i, entry, settings) for i, entry in enumerate(entries)])
    _refuse_equal_names(configs)
    return AppConfig(configs, listed=True)


def _plain_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key).replace("-", "_"): value for key, value in values.items()}


def _entries(models: Any) -> list[dict[str, Any]]:
    if not isinstance(models, list | tuple) or not models:
        raise ConfigError("models: must be a list of at least one, such as `- model: demo`", "models")
    for i, entry in enumerate(models):
        if not isinstance(entry, Mapping):
            raise ConfigError(f"models[{i}]: must hold settings such as `model: demo`, not {entry!r}", "models")
    return [_plain_keys(entry) for entry in models]


def _parsed(number: int, entry: Mapping[str, Any], shared: Mapping[str, Any]) -> ClusterConfig:
    path = f"models[{number}]"
    for key in entry:
        if key in APP_WIDE:
            raise ConfigError(f"{path}.{key} is a setting of the whole app: put it beside models", key)
        try:
            refuse_unknown(key, PER_MODEL)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}", key) from None
    try:
        return parse_config({**shared, **entry})
    except ConfigError as error:
        raise error if _is_shared(error.flag, entry, shared) else placed_error(error, path) from None


def _is_shared(flag: str | None, entry: Mapping[str, Any], shared: Mapping[str, Any]) -> bool:
    return flag in shared and flag not in entry


def placed_error(error: ConfigError, path: str) -> ConfigError:
    """Return an error that says at which place of the configuration it is."""
    text = str(error)
    apart = "." if error.flag and text.startswith(error.flag) else ": "
    return ConfigError(f"{path}{apart}{text}", error.flag)


def _refuse_equal_names(configs: tuple[ClusterConfig, ...]) -> None:
    owners: dict[str, int] = {}
    for number, config in enumerate(configs):
        for name in config.names:
            owner = owners.setdefault(name, number)
            if owner != number:
                raise ConfigError(
                    f"models[{number}].served_model_name: {name!r} is the name of models[{owner}] already; give it "
                    f"another, such as {name}-{number + 1}",
                    "served_model_name",
                )
