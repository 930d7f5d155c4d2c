"""What can be said of an app's models by their files alone. Needs no torch."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cluster.app_config import AppConfig, placed_error
from cluster.config import ClusterConfig
from cluster.model_names import known_models, resolve_model
from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError
from engine.loader.checkpoint import CONFIG_FILES, check_weight_files, find_checkpoint, open_model
from engine.models.config import ModelConfig
from engine.sampling_defaults import sampling_defaults
from parallel.errors import ShardingError

T = TypeVar("T")


def each_model(app: AppConfig, check: Callable[[ClusterConfig], T]) -> list[T]:
    """Return what `check` does of each model. What it raises names the place of the model where there are several."""
    return [_placed(i, config, check) if app.listed else check(config) for i, config in enumerate(app.models)]


def _placed(number: int, config: ClusterConfig, check: Callable[[ClusterConfig], T]) -> T:
    path = f"models[{number}]"
    try:
        return check(config)
    except ConfigError as error:
        raise placed_error(error, path) from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except ShardingError as error:
        raise ShardingError(f"{path}: {error}") from error


def check_files(app: AppConfig) -> None:
    """Read the config of each model, and look for the weights of those that are folders of this machine.

    For a Ray on this machine; where a cluster is joined, other machines read them. Raises `ConfigError` for a name
    that is none, and `CheckpointError` naming what lacks.
    """
    each_model(app, check_texts)
    for folder in [Path(resolve_model(config.source)) for config in app.models]:
        if folder.is_dir():
            check_weight_files(folder)


def check_texts(config: ClusterConfig) -> ModelConfig:
    """Return a model's config, with what is said of sampling checked. Raises `CheckpointError` and `ConfigError`."""
    source = resolve_model(config.source)
    model = read_model_config(source, config.model_impl, config.hf_overrides)
    sampling_defaults(
        find_checkpoint(source, CONFIG_FILES), config.generation_config, config.override_generation_config
    )
    return model


def sets_engine(app: AppConfig) -> bool:
    """Whether anything is set of how a model is run, so that it may not fit the model or this machine."""
    return any(config.engine != EngineConfig(config.engine.model) for config in app.models)


def read_model_config(model: str, impl: str = "auto", overrides: str | None = None) -> ModelConfig:
    """Read the config of a folder, or of a hub id without fetching its weights.

    impl, overrides: `model_impl` and `hf_overrides`.

    Raises `CheckpointError`.
    """
    # The hub's retries would be printed line by line; what comes of them is in the error.
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    try:
        return open_model(model, CONFIG_FILES, impl, overrides).config
    except CheckpointError as error:
        near = difflib.get_close_matches(model, known_models(), n=1)
        if Path(model).is_dir() or not near:
            raise
        raise CheckpointError(f"{error}; did you mean {near[0]}?") from error
