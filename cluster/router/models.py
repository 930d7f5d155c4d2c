"""The models of an app: what a front end knows and holds of each, and which one a request means."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.accounts.flight_recorder import Wait
from cluster.admission.admission_queue import AdmissionQueue
from cluster.config import ClusterConfig
from cluster.config_values import REASONING_PARSERS, TOOL_PARSERS
from cluster.openai.served_model import ServedModel, matryoshka_of
from cluster.openai.validation import unknown_model
from cluster.router.replica_set import ReplicaView
from cluster.router.why import Ask, Explanation, ReportedEvent, nothing_known
from cluster.telemetry.metrics import ModelMetrics
from cluster.wire.parts import Waited
from engine.errors import ConfigError, InvalidRequestError
from engine.kv.cache_size import fit_given_blocks
from engine.loader.checkpoint import TEXT_FILES, open_model, read_config
from engine.sampling_defaults import sampling_defaults
from engine.text.tokenizer import Tokenizer, read_chat_template


@dataclass(frozen=True, slots=True)
class ModelFront:
    """One model as the ingresses see it.

    admission: the queue through which its tokens come. metrics: under its name. ready: whether requests that come now
    are served. replicas: a snapshot. ask_router: returns what a request waited for in the router and on replicas.
    """

    model: ServedModel
    admission: AdmissionQueue
    metrics: ModelMetrics
    ready: Callable[[], bool]
    replicas: Callable[[], Sequence[ReplicaView]] = list
    ask_router: Ask = nothing_known

    @property
    def model_id(self) -> str:
        """The id that answers and figures show."""
        return self.model.model_id

    async def explain(self, name: str, tenant: str | None) -> Explanation:
        """Return what a request waited for, also in line. Arguments as of `Ask`."""
        found = await self.ask_router(name, tenant)
        in_line = tuple(
            ReportedEvent(Waited(age, Wait.TURN, detail)) for age, detail in self.admission.waits_for(name, tenant)
        )
        return replace(found, events=found.events + in_line)


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
        at all is left to the validation of the other fields.
        """
        name = fields.get("model")
        if isinstance(name, str):
            return self.named(name)
        if name is None and len(self._fronts) > 1:
            known = ", ".join(self.names)
            raise InvalidRequestError(
                f"model is missing; this server has {known}", "model", "missing_required_parameter"
            )
        return self._fronts[0]


def served_model(config: ClusterConfig) -> ServedModel:
    """Read a resolved configuration's tokenizer and config files, and fetch no weights; raises `SquadronError`."""
    folder = open_model(config.source, TEXT_FILES, config.model_impl, config.hf_overrides)
    model = folder.config
    tools, reasoning = config.tool_call_parser, config.reasoning_parser
    template = None if config.chat_template is None else read_chat_template(config.chat_template)
    shrink = config.max_model_len is None
    engine = config.engine.resolved(max_model_len=config.max_model_len or model.max_positions)
    return ServedModel(
        model_id=config.model_id,
        aliases=config.names[1:],
        tokenizer=Tokenizer(config.tokenizer or config.source, template),
        max_model_len=fit_given_blocks(engine, shrink).context_len,
        vocab_size=model.vocab_size,
        tool_parser=None if tools is None else TOOL_PARSERS.load(tools),
        reasoning_parser=None if reasoning is None else REASONING_PARSERS.load(reasoning),
        pooling="mean" if config.embedding_pooling == "mean" else "last",
        matryoshka=matryoshka_of(read_config(folder.path, config.hf_overrides)),
        by_priority=engine.scheduling_policy == "priority",
        strict_fields=config.strict_fields,
        max_logprobs=config.max_logprobs,
        sampling_defaults=sampling_defaults(folder.path, config.generation_config, config.override_generation_config),
    )
