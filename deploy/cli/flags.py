"""Command-line flags made from `ClusterConfig`: one flag per setting, so that there is one source of truth.

Flags of `vllm serve` that are none here say what to do instead (`deploy.cli.vllm_flags`).
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, dataclass, fields
from operator import getitem
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from cluster.config import ClusterConfig
from cluster.config_values import (
    FAILURE_ACTIONS,
    INGRESSES,
    LOG_FORMATS,
    METRICS_COMPATS,
    MIGRATIONS,
    POOLINGS,
    REASONING_PARSERS,
    SHORT_NUMBERS,
    TOOL_PARSERS,
)
from cluster.routing_policies import ROUTING_POLICIES
from deploy.cli.flag_texts import HELP, OPEN_DEFAULTS
from deploy.cli.vllm_flags import (
    ALIASES,
    advice_on,
    join_names,
    our_spelling,
    parted,
    without_last_name,
    without_more_keys,
)
from deploy.cli.wrong_values import without_value
from engine.config import (
    ATTENTION_BACKENDS,
    DEVICES,
    DTYPES,
    KV_CACHE_DTYPES,
    MODEL_IMPLS,
    QUANTIZATIONS,
    SCHEDULING_POLICIES,
)
from engine.errors import ConfigError, flag
from engine.near_name import near_name
from engine.vllm_advice import ADVICE

POSITIONAL = "model"
SEVERAL_KEYS = "--api-key takes one key: give several in a file of `squadron keys new` as --api-key-file"
MODEL_FLAG = "model_flag"
IN_JSON = ("--hf-overrides", "--override-generation-config")
CHOICES = {
    "model_impl": MODEL_IMPLS,
    "dtype": DTYPES,
    "quantization": QUANTIZATIONS,
    "device": DEVICES,
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "scheduling_policy": SCHEDULING_POLICIES,
    "attention_backend": ATTENTION_BACKENDS,
    "tool_call_parser": TOOL_PARSERS.names(),
    "reasoning_parser": REASONING_PARSERS.names(),
    "embedding_pooling": POOLINGS,
    "routing_policy": tuple(ROUTING_POLICIES),
    "stream_migration": MIGRATIONS,
    "ingress": INGRESSES,
    "update_failure_action": FAILURE_ACTIONS,
    "metrics_compat": METRICS_COMPATS,
    "log_format": LOG_FORMATS,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of `ClusterConfig` as a flag. `shown` is its default in words; `kind` is int, float, str or bool."""

    name: str
    kind: type
    shown: str
    panel: str
    help: str


# Flags of `squadron batch` that are no settings.
OF_A_BATCH = (
    "params",
    "max_tokens",
    "temperature",
    "template",
    "chat",
    "system",
    "prompt_column",
    "messages_column",
    "id_column",
    "answer_column",
    "stdin_suffix",
    "format",
    "output_format",
    "app",
)
QUOTED = r"(?<!\w)(['\"])(?:\\.|(?!\1).)*\1(?!\w)"  # of a message; the first group is its quotation mark
# Flags of `squadron plan` that are no settings, and the settings that change what a model needs of a GPU.
OF_A_PLAN = (
    "gpu",
    "gpus_per_node",
    "rps",
    "ttft",
    "tpot",
    "input_len",
    "output_len",
    "headroom",
    "spare_replicas",
    "roofline_share",
)
PLANNED = (
    "revision",
    "hf_overrides",
    "model_impl",
    "tensor_parallel_size",
    "enable_expert_parallel",
    "dtype",
    "quantization",
    "quantization_group_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_kv_blocks",
    "kv_cache_dtype",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "enforce_eager",
    "cudagraph_capture_sizes",
    "async_scheduling",
)
# What concerns clients and copies of a service, of which a batch has none.
OF_A_SERVICE = (
    *HELP["HTTP"],
    *HELP["Batches"],
    *HELP["Observability"],
    "routers",
    "min_replicas",
    "max_replicas",
    "upscale_delay_s",
    "downscale_delay_s",
    "downscale_to_zero_delay_s",
    "cold_start_timeout",
    "no_replica_timeout",
    "stream_migration",
    "router_wait",
    "response_retention",
    "drain_timeout",
    "max_surge_percent",
    "update_failure_action",
)


class SettingsCommand(TyperCommand):
    """A command with settings, which takes vLLM's spelling of them (`deploy.cli.vllm_flags`).

    Of an unknown flag it says what to do here, if it is one of vLLM's, or else asks "did you mean".
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as usual; say what helps when a flag is unknown."""
        own = self._own
        given = self.spelt(ctx, our_spelling(args, own))
        try:
            return super().parse_args(ctx, list(given))  # which it empties
        except Exception as error:
            # Typer exports no class for these errors; an attribute, or what they say, tells them from each other.
            message = str(getattr(error, "message", ""))
            if message.endswith("does not take a value."):
                error.message = without_value(error.option_name, own)  # type: ignore[attr-defined]  # see above
            elif hasattr(error, "possibilities"):
                error.message = _unknown(error.option_name, given, own)  # type: ignore[attr-defined]  # see above
                error.possibilities = None
            raise

    def spelt(self, ctx: Any, args: list[str]) -> list[str]:
        """Return the command line with what else this command takes."""
        return args

    @property
    def _own(self) -> list[str]:
        return [name for param in self.params for name in (*param.opts, *param.secondary_opts) if name[:1] == "-"]


class ServeCommand(SettingsCommand):
    """`squadron serve`, whose names may be separated by blanks. The last is the model where nothing else is."""

    def spelt(self, ctx: Any, args: list[str]) -> list[str]:
        """Join names. Raises `ConfigError` for several keys, which vLLM takes."""
        joined = join_names(args)
        with_one, others = without_more_keys(joined)
        if others and (len(others) > 1 or self._has(ctx, with_one, POSITIONAL, MODEL_FLAG)):
            raise ConfigError(SEVERAL_KEYS, "api_key")
        named = self._has(ctx, joined, POSITIONAL, MODEL_FLAG, "config")
        return without_last_name(joined) if named is False else joined

    def _has(self, ctx: Any, args: list[str], *names: str) -> bool | None:
        """Return whether any of these is on the command line, None where that cannot be parsed."""
        try:
            found = self.make_parser(ctx).parse_args(list(args))[0]
        except Exception:  # is raised again, and told of, when the command line is parsed
            return None
        return any(found.get(name) for name in names)


def _unknown(option: str, arguments: Sequence[str], own: Collection[str]) -> str:
    """Return what to say of an unknown flag."""
    found = advice_on(option, arguments)
    if found is not None:
        return f"No such option: {found[0]}. {found[1]}."
    if (apart := parted(option, arguments, own)) is not None:
        return f"No such option: {apart.replace(' ', '')}. Write {apart}."
    whole, _, part = option.partition(".")
    if whole in own and whole in IN_JSON:
        return f"No such option: {option}. Give {whole} one JSON object, such as '{_in_json(part)}'."
    if f"--{option.removeprefix('--no-').removeprefix('--')}" not in own and _is_setting(option):
        return f"No such option: {option}. It is for `squadron serve` and changes nothing here: leave it out."
    return f"No such option: {option}{_near(option, own)}"


def _in_json(path: str) -> str:
    """Return the JSON object whose part `a.b` vLLM takes as a flag of its own."""
    value: Any = "VALUE"
    for name in reversed(path.split(".")):
        value = {name: value}
    return json.dumps(value)


def _near(option: str, own: Collection[str]) -> str:
    """Return what to say of a flag that is nearly one of ours or of vLLM's."""
    near = near_name(option, [*(name for name in own if name.startswith("--")), *ADVICE])
    if near is None:
        return ""
    return f", nor vLLM's {near}. {ADVICE[near].text}." if near in ADVICE else f". Did you mean {near}?"


def _is_setting(option: str) -> bool:
    """Whether a flag, or `--no-` and its name, is one of `squadron serve`."""
    name = option.removeprefix("--no-").removeprefix("--").replace("-", "_")
    return option.startswith("--") and any(setting.name == name for setting in settings())


def settings() -> tuple[Setting, ...]:
    """Return every setting but the model, in the order of the help page."""
    hints = get_type_hints(ClusterConfig)
    defaults = {f.name: f.default for f in fields(ClusterConfig)}
    return tuple(
        Setting(name, _plain(hints[name]), _shown(name, defaults[name]), panel, text)
        for panel, texts in HELP.items()
        for name, text in texts.items()
    )


def with_settings(function: Callable[..., None], left_out: Collection[str] = ()) -> Callable[..., None]:
    """Give a command one flag per setting; its `**chosen` gets those that were on the command line.

    left_out: settings that mean nothing to it.
    """
    offered = [setting for setting in settings() if setting.name not in left_out]
    names = {setting.name for setting in offered}

    def command(**values: Any) -> None:
        chosen = {key: value for key, value in values.items() if key in names and value is not None}
        function(**{key: value for key, value in values.items() if key not in names}, **chosen)

    own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    made = [_parameter(setting) for setting in offered]
    command.__name__ = function.__name__
    command.__doc__ = function.__doc__
    command.__annotations__ = {p.name: p.annotation for p in (*own, *made)}
    command.__signature__ = inspect.Signature([*own, *made])  # type: ignore[attr-defined]  # read by typer
    return command


def all_but(kept: Collection[str]) -> tuple[str, ...]:
    """Return the names of the settings that are not among `kept`."""
    return tuple(setting.name for setting in settings() if setting.name not in kept)


def in_flags(message: str) -> str:
    """Spell the settings in an engine's message as flags: `raise num_kv_blocks` -> `raise --num-kv-blocks`.

    A setting of one plain word, such as port, is taken for one only before `=`, or at the head of the message before
    `:`, "must be" or "is for". What stands in quotes is a value, and stays as it is.
    """
    words = [f.name for f in fields(ClusterConfig) if f.name != POSITIONAL] + [*OF_A_BATCH, *OF_A_PLAN]
    compound = "|".join(name for name in words if "_" in name)
    plain = "|".join(name for name in words if "_" not in name)
    several = rf"(?<![-\w./])({compound})(?!\w|\.json\b)"
    found = rf"{QUOTED}|{several}|(?<![-\w./])({plain})(?==)|^({plain})(?=:| must be | is for )"
    return re.sub(found, lambda match: match[0] if match[1] else flag(match[0]), message)


def _parameter(setting: Setting) -> inspect.Parameter:
    spelt = flag(setting.name)
    names = [spelt] if setting.kind is not bool else [f"{spelt}/--no-{spelt[2:]}"]
    names.extend(ALIASES.get(setting.name, ()))
    short = setting.name in SHORT_NUMBERS
    option = typer.Option(
        *names,
        help=f"{setting.help} (default: {setting.shown})",
        show_default=False,
        metavar="int|32k" if short else "|".join(CHOICES.get(setting.name, ())) or None,
        rich_help_panel=setting.panel,
    )
    annotation = getitem(
        Annotated, ((str if short else setting.kind) | None, option)
    )  # made, not written: mypy need not know it
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _plain(hint: Any) -> type:
    """Return int, float, str or bool from an annotation such as `Annotated[int, ...] | None`."""
    if get_origin(hint) is Annotated:
        return _plain(get_args(hint)[0])
    if get_origin(hint) is tuple:
        return str  # names separated by commas
    if get_origin(hint) in (Union, UnionType):
        return _plain(next(part for part in get_args(hint) if part is not NoneType))
    kind: type = hint
    return kind


def _shown(name: str, default: Any) -> str:
    if default is None or default is MISSING:
        return OPEN_DEFAULTS[name]
    return f"{default:,}" if type(default) is int and default >= 10**6 else str(default)
