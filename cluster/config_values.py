"""What settings may be: names of choices, forms of values, and the parsers that packages offer.

Configuration is read by all that starts, so this module imports nothing else of the cluster.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit, urlunsplit

from pydantic import AfterValidator, BeforeValidator, Field

from engine.errors import ConfigError
from engine.short_numbers import context_length, short_number

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Retention = Annotated[float, Field(ge=0, le=86_400)]  # seconds for which what is kept takes memory: a day at most
DEFAULT_TTFT = 2.0  # seconds that autoscaling aims at where nothing else is said
POOLINGS = ("last", "mean")  # `engine.request.Pooling`, whose module a command line need not wait for
AUTO, SERVE, GATEWAY = INGRESSES = ("auto", "serve", "gateway")
MAX_FILE_BYTES = 200 * 1024 * 1024  # OpenAI's limit for the input of a batch
FAILURE_ACTIONS = ("rollback", "pause")
METRICS_COMPATS = ("vllm",)
LOG_FORMATS = ("text", "json")
# Where the same code computes with the same weights in the same way; or where only rounding may differ.
EXACT, SAME_WEIGHTS = MIGRATIONS = ("exact", "same-weights")
ANY = "*"  # host, or site
DEFAULT_PORTS = {"http": ":80", "https": ":443"}
HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[-a-z0-9._]+)(:[0-9]{0,5})?")
ORIGIN = re.compile(rf"(?P<scheme>[a-z][-+.a-z0-9]*)://(?P<host>{HOST.pattern})")
EXAMPLES = "http://localhost:4318/v1/traces, or file:///tmp/traces.jsonl"
OTLP_PATH = "/v1/traces"  # source: OTLP 1.x, the default path of traces over HTTP


def _names(value: Any) -> Any:
    """Names separated by commas, as on the command line, or a list of them, as in a file."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple):
        return names
    if not names or not all(isinstance(name, str) and name.strip() for name in names):
        raise ValueError("must be one or more names, such as my-model,my-alias")
    return tuple([name.strip() for name in names])


Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
MAX_CONNECTIONS = 4096  # of HTTP, unless told
LEAST_CONNECTIONS = 4  # half of them for one address: beside a stream there is room for one that is idle
# Settings that are read so.
SHORT_NUMBERS = (
    "max_model_len",
    "max_num_batched_tokens",
    "kv_cache_memory_bytes",
    "max_inflight_tokens",
    "max_body_bytes",
    "max_file_bytes",
)
Short = BeforeValidator(short_number)  # of numbers of tokens and bytes
ContextLength = Annotated[int | None, BeforeValidator(context_length)]


def json_text(value: Any) -> Any:
    """Return a mapping, as a file has it, as the text that a command line has."""
    return json.dumps(value) if isinstance(value, Mapping) else value


def json_object(text: str) -> str:
    """Return the text of a JSON object; raises `ValueError` for another."""
    try:
        if isinstance(json.loads(text), dict):
            return text
    except ValueError:
        pass
    raise ValueError("must be a JSON object such as '{\"temperature\": 0.7}'")


JsonText = Annotated[str, BeforeValidator(json_text)]
JsonObject = Annotated[JsonText, AfterValidator(json_object)]


def _each(check: Callable[[str], str]) -> BeforeValidator:
    """Texts separated by commas (command line), a list (file), or a JSON list (vLLM's flags)."""

    def checked(value: Any) -> Any:
        if isinstance(value, str):
            value = _listed(value) if value.startswith("[") else value.split(",")
        if not isinstance(value, list | tuple):
            return value
        if not value or not all(isinstance(one, str) for one in value):
            raise ValueError("must be one or more, separated by commas")
        return tuple([check(one.strip()) for one in value])

    return BeforeValidator(checked)


def _listed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise ValueError("must be texts separated by commas, or a list of them in JSON") from None


def host_name(name: str) -> str:
    """Return a name of `allowed_hosts` as it is compared. Raises `ValueError` for what is none."""
    found = name.lower().rstrip(".")
    if found != ANY and not re.fullmatch(r"(\*\.)?[a-z0-9_]([-a-z0-9_.]*[a-z0-9_])?", found):
        raise ValueError("must be names without scheme, port or path, such as llm.example.com, *.example.com or *")
    return found


def site_origin(origin: str) -> str:
    """Return an origin of `allowed_origins` as browsers spell it. Raises `ValueError` for what is none."""
    found = origin.lower()
    if found in (ANY, "null"):
        return found
    parts = ORIGIN.fullmatch(found)
    if parts is None:
        raise ValueError("must be a site's scheme and host, such as https://chat.example.com, or *")
    return found.removesuffix(DEFAULT_PORTS.get(parts["scheme"], ""))


HostNames = Annotated[tuple[str, ...], _each(host_name)]
Origins = Annotated[tuple[str, ...], _each(site_origin)]


def listen_host(host: str) -> str:
    """Return an address or a name to listen on. Raises `ValueError` for what is none, such as a URL."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if not re.fullmatch(r"\w([-\w.]*\w)?", host):
            raise ValueError(
                "must be an address or a name without scheme or port, such as 127.0.0.1, 0.0.0.0 or ::"
            ) from None
    return host


ROUTE_ROOTS = ("/v1", "/v2", "/why")  # of routes below them, which could not be told from those below a prefix


def path_prefix(path: str) -> str:
    """Return a `root_path` without a slash at its end. Raises `ValueError` for what is none, or one of the API's."""
    found = path.rstrip("/")
    if not re.fullmatch(r"(/[-\w.~]+)+", found, re.ASCII):
        raise ValueError("must be a path such as /llm")
    if found in ROUTE_ROOTS:
        raise ValueError("must be another path than those of the API, such as /llm")
    return found


def some_key(key: Any) -> Any:
    """Return a key; raises `ValueError` for an empty one, and for what is no text."""
    if not isinstance(key, str):
        raise ValueError("must be one key, in quotes if it is a number; several go in a file as --api-key-file")
    if not key.strip():
        raise ValueError("must be a key; leave it out for a server that is open to all")
    return key


def _sizes(value: Any) -> Any:
    """Numbers separated by commas, as on the command line, or a list of them, as in a file."""
    if not isinstance(value, str):
        return value
    try:
        return tuple(int(size) for size in value.split(","))
    except ValueError:
        raise ValueError("must be numbers separated by commas, such as 1,2,4,8") from None


Sizes = Annotated[tuple[int, ...], BeforeValidator(_sizes)]


def one_of(names: tuple[str, ...]) -> AfterValidator:
    """Return the check that a text is one of `names`."""

    def check(name: str) -> str:
        if name not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return name

    return AfterValidator(check)


def checked_endpoint(url: str) -> str:
    """Return the URL, with OTLP's path where a collector's has none. Raises `ValueError` that says what works."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(f"must be a URL such as {EXAMPLES}") from None
    if parts.scheme == "file" and parts.path.startswith("/") and parts.netloc in ("", "localhost"):
        if parts.path.endswith("/"):
            raise ValueError("must name a file, such as file:///tmp/traces.jsonl")
        if parts.query or parts.fragment or "\0" in unquote(parts.path):
            raise ValueError(
                "must be the path of a file with ? as %3F and # as %23, such as file:///tmp/traces.jsonl"
            )
        return url
    if parts.scheme in ("http", "https") and parts.hostname and port != 0:
        return url if parts.path not in ("", "/") else urlunsplit(parts._replace(path=OTLP_PATH))
    if parts.scheme == "grpc":
        raise ValueError(f"must be OTLP over HTTP, not gRPC: {EXAMPLES}; collectors take it at port 4318")
    raise ValueError(f"must be a URL such as {EXAMPLES}")


def file_of(url: str) -> Path | None:
    """Return the file that a checked endpoint names, None for a collector."""
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """Bounds and times, spelled as in Ray Serve's `AutoscalingConfig`; seconds. Raises `ConfigError`.

    target_ttft: time to the first token that is aimed at. upscale_delay_s / downscale_delay_s: how long a change must
    have been wanted without a break; downscale_to_zero_delay_s: the same for the last replica.
    """

    min_replicas: int
    max_replicas: int
    target_ttft: float
    upscale_delay_s: float
    downscale_delay_s: float
    downscale_to_zero_delay_s: float

    def __post_init__(self) -> None:
        if self.max_replicas < max(self.min_replicas, 1):
            raise ConfigError(
                f"max_replicas must be at least 1 and at least min_replicas ({self.min_replicas}), "
                f"not {self.max_replicas}",
                "max_replicas",
            )

    def bounded(self, replicas: int) -> int:
        """Return the nearest number of replicas that is allowed."""
        return max(self.min_replicas, min(self.max_replicas, replicas))


class ParserNames:
    """Parsers by name: our own, and those that installed packages offer as entry points of `group`.

    flag: the setting whose value the names are, for the errors. own: name -> `module:class`, imported when asked for.
    """

    def __init__(self, flag: str, group: str, own: Mapping[str, str]) -> None:
        self._flag = flag
        self._group = group
        self._own = {name: EntryPoint(name, value, group) for name, value in own.items()}

    def names(self) -> tuple[str, ...]:
        """Return all names, sorted. Raises `ConfigError` when one is offered twice."""
        return tuple(sorted(self._known()))

    def load(self, name: str) -> Any:
        """Import and return the parser's class; raises `ConfigError` that lists the known names."""
        known = self._known()
        if name not in known:
            listed = ", ".join(sorted(known))
            raise ConfigError(f"{self._flag}: there is no parser {name!r}; known: {listed}", self._flag)
        try:
            return known[name].load()
        except (ImportError, AttributeError) as error:
            where = known[name].value
            raise ConfigError(f"{self._flag}: {name} ({where}) cannot be had: {error}", self._flag) from error

    def _known(self) -> dict[str, EntryPoint]:
        found = dict(self._own)
        for entry in entry_points(group=self._group):
            if found.setdefault(entry.name, entry).value != entry.value:
                raise ConfigError(
                    f"{self._flag}: {entry.value} is registered as {entry.name!r}, a name that is taken", self._flag
                )
        return found


TOOL_PARSERS = ParserNames(
    "tool_call_parser",
    "squadron.tool_parsers",
    {
        "deepseek_v3": "cluster.openai.parsers.tool_formats:DeepSeekV3Parser",
        "deepseek_v31": "cluster.openai.parsers.tool_formats:DeepSeekV31Parser",
        "gemma4": "cluster.openai.parsers.gemma4:Gemma4ToolParser",
        "glm45": "cluster.openai.parsers.tagged_formats:Glm45Parser",
        "hermes": "cluster.openai.parsers.tool_formats:HermesParser",
        "kimi_k2": "cluster.openai.parsers.tool_formats:KimiK2Parser",
        "llama3_json": "cluster.openai.parsers.tool_formats:Llama3JsonParser",
        "minimax_m2": "cluster.openai.parsers.tagged_formats:MiniMaxM2Parser",
        "mistral": "cluster.openai.parsers.tool_formats:MistralParser",
        "openai": "cluster.openai.parsers.tool_formats:GptOssToolParser",
        "pythonic": "cluster.openai.parsers.pythonic:PythonicParser",
        "qwen3_coder": "cluster.openai.parsers.tagged_formats:Qwen3CoderParser",
    },
)
REASONING_PARSERS = ParserNames(
    "reasoning_parser",
    "squadron.reasoning_parsers",
    {
        "deepseek_r1": "cluster.openai.parsers.reasoning:DeepSeekR1Parser",
        "gemma4": "cluster.openai.parsers.gemma4:Gemma4ReasoningParser",
        "glm45": "cluster.openai.parsers.reasoning:Glm45ReasoningParser",
        "minimax_m2": "cluster.openai.parsers.reasoning:MiniMaxM2ReasoningParser",
        "openai_gptoss": "cluster.openai.parsers.reasoning:GptOssParser",
        "qwen3": "cluster.openai.parsers.reasoning:Qwen3Parser",
    },
)
