"""The models of an app by the names that clients use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cluster.openai.checking import unknown_model
from cluster.router.models.front import ModelFront
from engine.errors import ConfigError, InvalidRequestError


class Models:
    """At least one model; the first is taken where it makes no difference. Raises `ConfigError` for equal names."""

    def __init__(self, fronts: Sequence[ModelFront]) -> None:
        self._fronts = tuple(fronts)
        self._by_name: dict[str, ModelFront] = {}
        for front in self._fronts:
            for name in front.model.names:
                if name in self._by_name:
                    raise ConfigError(f"served_model_name: two models are named {name!r}", "served_model_name")
                self._by_name[name] = front
        if not self._fronts:
            raise ConfigError("models: there must be at least one", "models")

    def __iter__(self) -> Iterator[ModelFront]:
        return iter(self._fronts)

    def __len__(self) -> int:
        return len(self._fronts)

    @property
    def names(self) -> list[str]:
        """All names, those of one model beside each other."""
        return list(self._by_name)

    def named(self, name: str) -> ModelFront:
        """Return the model of that name; raises `ApiError` (404) that names those there are."""
        front = self._by_name.get(name)
        if front is None:
            raise unknown_model(name, self.names)
        return front

    def of(self, fields: Mapping[str, Any]) -> ModelFront:
        """Return the model that a request's `model` means.

        Raises `ApiError` (404), and `InvalidRequestError` where it is missing and there are several. What is no name
        at all is left to whoever checks the other fields.
        """
        name = fields.get("model")
        if isinstance(name, str):
            return self.named(name)
        if name is None and len(self._fronts) > 1:
            known = ", ".join(self.names)
            raise InvalidRequestError(f"model is missing; this server has {known}", "model", "missing_parameter")
        return self._fronts[0]
