"""One configuration for the command line, the YAML file, the Serve app's arguments and the chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from cluster.config_values import (
    DEFAULT_TTFT,
    EXACT,
    FAILURE_ACTIONS,
    GATEWAY,
    INGRESSES,
    LEAST_CONNECTIONS,
    LOG_FORMATS,
    MAX_CONNECTIONS,
    MAX_FILE_BYTES,
    METRICS_COMPATS,
    MIGRATIONS,
    POOLINGS,
    REASONING_PARSERS,
    SHORT_NUMBERS,
    TOOL_PARSERS,
    ContextLength,
    Count,
    HostNames,
    JsonObject,
    JsonText,
    Names,
    Origins,
    Retention,
    ScalingSettings,
    Seconds,
    Short,
    Sizes,
    checked_endpoint,
    listen_host,
    one_of,
    path_prefix,
    some_key,
)
from cluster.model_names import resolve_model
from cluster.routing_policies import policy_named
from engine.config import EngineConfig, config_fields, split_revision
from engine.errors import ConfigError
from engine.near_name import near_name
from engine.text.tokenizer import read_chat_template

NO_KEYS: Mapping[str, None] = {"api_key": None, "api_key_file": None, "metrics_key": None}  # for those who need none
SECRET = ("api_key", "metrics_key")  # which no message repeats


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=False))
class ServedModelConfig(EngineConfig):
    """The settings of one model: the engine's, and those of its replicas.

    served_model_name: the ids that clients may use, the first of them in answers; None = the last part of `model`.
    replicas: copies of the tensor-parallel group.
    cpus_per_worker: CPUs that Ray reserves for each rank (a GPU is reserved as well on CUDA).
    max_inflight / max_inflight_tokens: sequences, and tokens of prompts and expected output, that one router hands to
        the replicas at once; None = its share of what their steps and KV caches hold, and a little more. The rest
        waits, each tenant in a line of its own, and tenants take turns.
    target_ttft: seconds to the first token that are aimed at: as long a request may wait at most, if that is less
        than `max_queue_wait`; and what autoscaling goes by, 2 unless given.
    min_replicas / max_replicas: bounds of autoscaling, which there is where `max_replicas` is given; `replicas` are
        started first, or `min_replicas` where they are not said. With 0 the last replica goes when nothing has come
        for a while, and the next request waits for another, at most `cold_start_timeout` seconds.
    no_replica_timeout: seconds that a request that has run waits for another replica where all are lost, then 503
        (`replica_lost`); None = as long as a start may take, `cold_start_timeout`.
    upscale_delay_s / downscale_delay_s / downscale_to_zero_delay_s: seconds that more or fewer replicas must have
        been wanted without a break, and none at all.
    routing_policy: how a router chooses the replica of a request (`ROUTING_POLICIES`).
    stream_migration: where a stream goes on whose replica is lost (`MIGRATIONS`): `exact`, where the same code
        computes with the same weights in the same way, or `same-weights`, where the rest may differ by rounding.
    tool_call_parser: name of the format in which the model writes calls of tools (`TOOL_PARSERS`); without it
        `tool_choice` "auto" is refused, while forced calls need none.
    reasoning_parser: name of the way in which the model marks its thinking (`REASONING_PARSERS`); None = thinking is
        part of the content.
    chat_template: a file of Jinja, or the template itself, in the place of the model's own; None = that.
    generation_config: where the sampling parameters come from that a request leaves open: `auto`, the model's
        generation_config.json; `vllm`, nowhere, so that they are neutral; or the folder of another such file. Its
        `max_new_tokens` is also the most that any request gets.
    override_generation_config: what that is to say instead, a JSON object or a mapping.
    embedding_pooling: what an embedding is made of where the client does not say: `last`, the state of the last
        token, or `mean`, that of all.
    """

    hf_overrides: JsonText | None = None
    max_model_len: ContextLength = None
    max_num_batched_tokens: Annotated[int, Short] | None = None
    kv_cache_memory_bytes: Annotated[int, Short] | None = None
    cudagraph_capture_sizes: Sizes | None = None
    served_model_name: Names | None = None
    replicas: Count = 1
    cpus_per_worker: Annotated[float, Field(ge=0)] = 1.0
    max_inflight: Count | None = None
    max_inflight_tokens: Annotated[Count, Short] | None = None
    target_ttft: Seconds | None = None
    min_replicas: Annotated[int, Field(ge=0)] | None = None
    max_replicas: Count | None = None
    upscale_delay_s: Annotated[float, Field(ge=0)] = 5.0
    downscale_delay_s: Annotated[float, Field(ge=0)] = 300.0
    downscale_to_zero_delay_s: Annotated[float, Field(ge=0)] | None = None
    cold_start_timeout: Seconds = 120.0
    no_replica_timeout: Seconds | None = None
    routing_policy: str = "kv_aware"
    stream_migration: Annotated[str, one_of(MIGRATIONS)] = EXACT
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    chat_template: str | None = None
    generation_config: str = "auto"
    override_generation_config: JsonObject | None = None
    embedding_pooling: Annotated[str, one_of(POOLINGS)] = "last"

    @property
    def most_replicas(self) -> int:
        """Replicas that there may be at one time."""
        return self.replicas if self.max_replicas is None else self.max_replicas

    @property
    def replica_wait(self) -> float:
        """Seconds that a request which has run waits for another replica: one takes as long to start as the first."""
        return self.cold_start_timeout if self.no_replica_timeout is None else self.no_replica_timeout

    @property
    def scales_to_zero(self) -> bool:
        """Whether the last replica stops when there are no requests."""
        return self.max_replicas is not None and self.min_replicas == 0

    @property
    def names(self) -> tuple[str, ...]:
        """All ids under which the model is served."""
        return self.served_model_name or (self.model.rstrip("/").split("/")[-1],)

    @property
    def model_id(self) -> str:
        """The first of them, which answers and metrics show."""
        return self.names[0]

    @property
    def engine(self) -> EngineConfig:
        """The part that the engine sees."""
        return EngineConfig(**{name: getattr(self, name) for name in config_fields()})


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=False))
class ClusterConfig(ServedModelConfig):
    """All settings of `squadron serve` for an app with one model; for several see `cluster.app_config`.

    routers: copies of the front end.
    ingress: what stands before the routers: `serve`, the proxy of Ray Serve; or `gateway`, as many gateways as there
        are routers, which listen themselves. `auto` is `gateway` on a Ray that `squadron serve` starts, else `serve`.
    host / port: where the ingress listens for HTTP. Loopback by default.
    grpc_port: where each router, or each gateway where there are any, listens for gRPC, on `host` of its own node,
        where they share it. None = not.
    api_key: required as a bearer token on every route but /health when set; of the tenant "default", without quota,
        an admin's: it sees all.
    api_key_file: YAML or JSON file of keys with tenants, expiry and quotas, on every node that runs a router; read
        again when it changes. `api_key` is valid beside it.
    allowed_hosts / allowed_origins: names by which clients may call the server beside the usual ones, and sites whose
        pages may use it (`cluster.http.sites`); None = the usual names, and pages of this machine; with keys, all.
    root_path: below which it answers, too, and which its document names, for a proxy that hands paths on so.
    metrics_key: opens /metrics and /ready, and GetLoad of gRPC, and nothing else: for who scrapes a server with keys.
    enable_sleep_mode: whether operators may have the replicas give their memory back for a time, by `POST /sleep`.
    max_waiting_per_tenant / max_queue_wait: requests of one tenant that may wait in a router for a model, and seconds
        that each may; one that would wait longer by the rate at which the queue drains gets a 429 at once.
    max_body_bytes: largest request body. max_connections: of HTTP that a gateway holds, half of them from one address
        at most; for one beyond that the longest idle one is closed.
    strict_fields: refuse fields that only hint and have no use here, in place of naming them in `x-squadron-ignored`.
    link_host: address on which replicas listen for routers and rank 0 for its workers; None = loopback for peers on
        the same node, the node's own address for others.
    stall_timeout: seconds without a report or heartbeat after which a router leaves a replica.
    router_wait: seconds that an answer waits for another router where its own is lost, then `router_lost`.
    response_retention: seconds for which responses that are stored, or run in the background, and answers to requests
        with an `Idempotency-Key` are kept after their end; 0 = none is, and requests for that are refused.
    drain_timeout: seconds that Serve waits for the streams of a stopping router or replica. A replica's go on
        elsewhere after 30 s if another replica has the same model.
    max_surge_percent: copies that an update may start beyond `replicas` before it stops old ones, as in Serve, which
        rounds up; 0 = stop first. None = one, where the cluster has room for it when the app is deployed, else 0.
    update_failure_action: what follows an update that fails, in Docker's words: `rollback` deploys the version
        before it again; `pause` leaves the app as Serve does, with the copies that are left, until it is deployed.
    batch_dir: where the files and batches of `/v1/files` and `/v1/batches` are kept: a directory that all routers
        share, or a URL that fsspec opens. None = nowhere, and these routes say so.
    max_file_bytes: largest file that may be uploaded; as with OpenAI 200 MiB unless given.
    otlp_traces_endpoint: where spans of requests are sent, OTLP over HTTP, or the file that they are appended to
        (`file:///...`); None = there are none.
    log_format: of what routers, replicas and ranks log: `text`, or `json`, an object a line.
    enable_log_requests / max_log_len: log a line for each request, and so many characters of its prompt.
    record_incidents: folder where each router records what happens to it, to be replayed in a simulator; None = not.
    batch_share: of the sequences that the replicas run, what batches may take while clients' requests run.
    metrics_compat: whose names metrics have beside ours: `vllm`, for dashboards and scalers that know those.
    """

    routers: Count = 1
    ingress: Annotated[str, one_of(INGRESSES)] = "auto"
    host: Annotated[str, AfterValidator(listen_host)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    grpc_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    api_key: Annotated[str, BeforeValidator(some_key)] | None = None
    api_key_file: str | None = None
    allowed_hosts: HostNames | None = None
    allowed_origins: Origins | None = None
    root_path: Annotated[str, AfterValidator(path_prefix)] | None = None
    metrics_key: str | None = None
    enable_sleep_mode: bool = False
    max_waiting_per_tenant: Count = 4096
    max_queue_wait: Seconds = 60.0
    max_body_bytes: Annotated[int, Field(ge=1024), Short] = 4 * 1024 * 1024
    max_connections: Annotated[int, Field(ge=LEAST_CONNECTIONS)] = MAX_CONNECTIONS
    strict_fields: bool = False
    link_host: str | None = None
    stall_timeout: Seconds = 3.0
    router_wait: Seconds = 60.0
    response_retention: Retention = 600.0
    drain_timeout: Seconds = 600.0
    max_surge_percent: Annotated[int, Field(ge=0, le=100)] | None = None
    update_failure_action: Annotated[str, one_of(FAILURE_ACTIONS)] = "rollback"
    batch_dir: str | None = None
    max_file_bytes: Annotated[int, Field(ge=1024), Short] = MAX_FILE_BYTES
    batch_share: Annotated[float, Field(gt=0, le=1)] = 0.25
    metrics_compat: Annotated[str, one_of(METRICS_COMPATS)] | None = None
    otlp_traces_endpoint: Annotated[str, AfterValidator(checked_endpoint)] | None = None
    log_format: Annotated[str, one_of(LOG_FORMATS)] = "text"
    enable_log_requests: bool = False
    max_log_len: Annotated[int, Field(ge=0)] = 0
    record_incidents: str | None = None

    @property
    def stream_grace(self) -> float:
        """Seconds of `drain_timeout` that running streams get: what Serve itself does at the end counts as well."""
        return max(self.drain_timeout - 5.0, min(1.0, self.drain_timeout / 2))

    @property
    def keyed(self) -> bool:
        """Whether clients need a key."""
        return self.api_key is not None or self.api_key_file is not None

    @property
    def gateways(self) -> int:
        """How many gateways there are before the routers: for clients' connections, or for those of gRPC alone."""
        return self.routers if self.ingress == GATEWAY or self.grpc_port is not None else 0


def parse_config(values: Mapping[str, Any]) -> ClusterConfig:
    """Check settings that came from a file, the command line or Serve. Keys may use dashes or underscores.

    Raises `ConfigError` that names the flag and, for an unknown one, the nearest known flag.
    """
    settings = {key.replace("-", "_"): value for key, value in values.items()}
    for key in settings:
        refuse_unknown(key, [f.name for f in fields(ClusterConfig)])
    if not settings.get("model"):
        raise ConfigError("model is missing: give a folder, a hub id or 'demo'", "model")
    try:
        config = TypeAdapter(ClusterConfig).validate_python(settings)
    except ValidationError as error:
        raise _as_config_error(error) from None
    _check_given(settings, config)
    if "replicas" not in settings and config.max_replicas is not None:
        config = replace(config, replicas=max(config.replicas, config.min_replicas or 0))
    _check_names(config)
    _check_metrics_key(config)
    scaling_settings(config)
    return config


def scaling_settings(config: ServedModelConfig) -> ScalingSettings | None:
    """Return what the autoscaling policy goes by, None for a fixed number of replicas.

    Raises `ConfigError` where the settings contradict each other.
    """
    most, least = config.max_replicas, 1 if config.min_replicas is None else config.min_replicas
    if most is None:
        if config.min_replicas is not None:
            raise ConfigError(
                f"max_replicas is missing: min_replicas={least} bounds autoscaling, so give max_replicas too, such "
                f"as {max(least, config.replicas) + 1}, or replicas={max(least, 1)} alone",
                "max_replicas",
            )
        return None
    idle = config.downscale_to_zero_delay_s
    down = config.downscale_delay_s
    settings = ScalingSettings(
        least, most, config.target_ttft or DEFAULT_TTFT, config.upscale_delay_s, down, down if idle is None else idle
    )
    if not max(least, 1) <= config.replicas <= most:
        raise ConfigError(
            f"replicas must be between {max(least, 1)} and {most}, as min_replicas and max_replicas say, "
            f"not {config.replicas}",
            "replicas",
        )
    return settings


def resolve_config(values: Mapping[str, Any]) -> ClusterConfig:
    """Like `parse_config`, with a short model name such as `demo` turned into its folder on this machine.

    The name stays what clients see. Raises `ConfigError`.
    """
    config = parse_config(values)
    found = resolve_model(config.source)
    model = found if config.revision is None else split_revision(found)[0]
    return replace(config, model=model, served_model_name=config.names)


def _check_given(settings: Mapping[str, Any], config: ClusterConfig) -> None:
    """Refuse what pydantic takes: `port: yes`, which YAML reads as true, for 1; and blank texts."""
    for name, value in settings.items():
        if isinstance(value, bool) and not isinstance(getattr(config, name), bool):
            raise ConfigError(f"{name}: must be a number{_such_as(name)}, not {value}", name)
        if isinstance(value, str) and not value.strip():
            usual = _default(name)
            example = f", or give a value such as {usual}" if isinstance(usual, str) else ""
            raise ConfigError(f"{name}: is empty; leave it out{example}", name)
    if config.port and config.port == config.grpc_port:
        raise ConfigError(
            f"grpc_port={config.grpc_port} is the port of HTTP already; give another, or 0 for any free one",
            "grpc_port",
        )


def _check_names(config: ClusterConfig) -> None:
    if config.tool_call_parser is not None:
        TOOL_PARSERS.load(config.tool_call_parser)
    if config.reasoning_parser is not None:
        REASONING_PARSERS.load(config.reasoning_parser)
    if config.chat_template is not None:
        read_chat_template(config.chat_template)
    policy_named(config.routing_policy)


def _check_metrics_key(config: ClusterConfig) -> None:
    if config.metrics_key is None:
        return
    if not config.keyed:
        raise ConfigError(
            "metrics_key: without API keys everybody may read the metrics; give --api-key or --api-key-file too",
            "metrics_key",
        )
    if not config.metrics_key.strip() or config.metrics_key == config.api_key:
        raise ConfigError(
            "metrics_key: must be a key of its own, such as `python -c 'import secrets; print(secrets.token_hex())'` "
            "prints; api_key opens the metrics anyway",
            "metrics_key",
        )


def refuse_unknown(key: str, known: Sequence[str]) -> None:
    """Raise `ConfigError` with the nearest known name unless `key` is one."""
    if key in known:
        return
    near = near_name(key, known)
    hint = f"did you mean {near}?" if near else "`squadron serve --help` names them all"
    raise ConfigError(f"unknown setting {key}; {hint}", key)


def _default(name: str) -> Any:
    return next((f.default for f in fields(ClusterConfig) if f.name == name), None)


def _such_as(name: str) -> str:
    """Return an example of a setting that is a number, where one is at hand."""
    if name in SHORT_NUMBERS:
        return " such as 32768 or 32k"
    default = _default(name)
    return f" such as {default}" if isinstance(default, int | float) else ""


def _as_config_error(error: ValidationError) -> ConfigError:
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else "model"
    said, kind = first["input"], first["type"]
    message = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
    if kind.startswith("int_"):
        message = f"must be a whole number{_such_as(name)}"
    elif kind in ("float_parsing", "float_type"):
        message = f"must be a number{_such_as(name)}"
    elif kind.startswith("bool_"):
        message = "must be true or false"
    elif kind == "string_type":
        quoted = f": put it in quotes, as in '{said}'" if isinstance(said, int | float) else ""
        message = f"must be a text{quoted}"
    return ConfigError(f"{name}: {message}" + ("" if name in SECRET else f", not {said!r}"), name)
