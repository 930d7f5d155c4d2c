"""The flags of `squadron batch`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer

from deploy.cli.flags import SettingsCommand
from deploy.cli.settings_file import merge_settings
from deploy.serve.environment import Environment, check_inherited, prepare_ray
from engine.errors import ConfigError, flag

if TYPE_CHECKING:
    from cluster.app_config import AppConfig
    from deploy.batch.command import BatchOptions

Kind = TypeVar("Kind", bound=StrEnum)
NO_OBJECT = "params must be a JSON object such as '{\"top_p\": 0.9}'"
ROWS = "Rows"
RUN = "Run"


class BatchCommand(SettingsCommand):
    """Says of one path alone that OUTPUT is missing: it is taken for OUTPUT, and INPUT missed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as usual; of one path, name OUTPUT as missing."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # Typer exports no class for missing arguments; their parameter is what tells them from other errors.
            missing = getattr(getattr(error, "param", None), "name", None)
            if missing == "inputs" and self.make_parser(ctx).parse_args(given)[0].get("output"):
                output = next(one for one in self.params if one.name == "output")
                error.param = output  # type: ignore[attr-defined]  # see above
            raise


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


@dataclass(frozen=True, slots=True)
class BatchFlags:
    """What the command line holds beside the settings of model and engine, a flag a field."""

    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...", help="Files (.jsonl, .csv, .parquet; .gz, .zst), folders, patterns, URLs, or -."
        ),
    ]
    output: Annotated[
        str,
        typer.Argument(
            metavar="OUTPUT",
            help="File of the answers: .jsonl, .csv or .parquet. Failed rows go to a file beside it.",
        ),
    ]
    model: Annotated[str | None, typer.Option("--model", "-m", help="A folder, a hub id, or 'demo'.")] = None
    config: Annotated[Path | None, typer.Option(help="YAML file of settings, as for `squadron serve`.")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue an earlier run of this output, or begin.")] = (
        False
    )
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check every row, count its tokens, and stop.")] = False
    app: Annotated[
        str | None, typer.Option("--app", help="Use the replicas of this Serve app, in the cluster of RAY_ADDRESS.")
    ] = None

    share: Annotated[
        float,
        _option(RUN, "With --app: share of its sequences while clients' requests run.", min=0.01, max=1.0),
    ] = 0.25
    max_errors: Annotated[int | None, _option(RUN, "Stop when more rows than this have failed.", min=0)] = None
    max_cost_tokens: Annotated[int | None, _option(RUN, "Stop before prompts and output use more tokens.", min=1)] = (
        None
    )
    lookahead: Annotated[int, _option(RUN, "Rows among which equal beginnings run together; 1 = off.", min=1)] = 1024
    ledger: Annotated[Path | None, _option(RUN, "Folder of the progress.", show_default="OUTPUT.ledger")] = None
    log_interval: Annotated[float, _option(RUN, "Seconds between progress lines without a terminal.", min=0.1)] = 10.0
    verbose: Annotated[bool, _option(RUN, "Show Ray's own logs.", "--verbose")] = False

    row_format: Annotated[
        str | None,
        _option(ROWS, "Format of the rows (default: that of the first row).", "--format", metavar="openai|plain"),
    ] = None
    output_format: Annotated[
        str | None,
        _option(
            ROWS,
            "Format of the answers: OpenAI's lines, or columns beside the input's.",
            metavar="openai|columns",
            show_default="that of the rows",
        ),
    ] = None
    stdin_suffix: Annotated[str, _option(ROWS, "Format of standard input, as a file suffix.")] = ".jsonl"
    prompt_column: Annotated[str, _option(ROWS, "Column of the prompt; 'text' for text files.")] = "prompt"
    messages_column: Annotated[str, _option(ROWS, "Column of a chat's messages.")] = "messages"
    template: Annotated[str | None, _option(ROWS, "Prompt made from columns, such as 'Translate: {{ text }}'.")] = (
        None
    )
    chat: Annotated[bool, _option(ROWS, "Treat the prompt as a user's message of a chat.", "--chat")] = False
    system: Annotated[str | None, _option(ROWS, "System message of every chat.")] = None
    id_column: Annotated[str, _option(ROWS, "Column of ids.", show_default="row-1, row-2, ...")] = ""
    answer_column: Annotated[str, _option(ROWS, "Column for the answer in the output.")] = "answer"
    max_tokens: Annotated[
        int | None,
        _option(ROWS, "Maximum tokens of an answer; without it a completion ends after 16, OpenAI's default.", min=1),
    ] = None
    temperature: Annotated[float | None, _option(ROWS, "0 = always the most likely token.", min=0.0)] = None
    params: Annotated[str | None, _option(ROWS, "More fields for every request, as JSON: '{\"top_p\": 0.9}'.")] = None


def batch(**given: Any) -> None:
    """Answer every row of INPUT into OUTPUT, each exactly once, whatever is killed meanwhile.

    Rows are requests in OpenAI's batch format, or columns with a prompt. The progress is kept beside OUTPUT: after a
    crash, the same command with --resume continues, also in the middle of answers.
    """
    flags = BatchFlags(**{one.name: given.pop(one.name) for one in fields(BatchFlags)})
    environment = Environment.read()
    settings = _settings(flags, given)
    if environment.ray_address is None:
        check_inherited()
    ray_address = prepare_ray(environment.ray_address)
    from deploy.batch.command import run_batch
    from deploy.batch.replicas import ServedApp

    where = ServedApp(str(flags.app), flags.model) if settings is None else settings.shared
    run_batch(where, _options(flags, ray_address, environment.source_date_epoch))


# Read by `with_settings`, which adds the settings: a flag for each field.
batch.__signature__ = inspect.signature(BatchFlags, eval_str=True)  # type: ignore[attr-defined]


def _settings(flags: BatchFlags, chosen: Mapping[str, Any]) -> AppConfig | None:
    """Return the settings of model and engine, None where an app has its own. Raises `ConfigError`."""
    if flags.app is None:
        return merge_settings(flags.config, {**chosen, **({} if flags.model is None else {"model": flags.model})})
    useless = ["--config"] * (flags.config is not None) + [flag(name) for name in chosen]
    if useless:
        raise ConfigError(f"app: its replicas have their own settings; leave out {', '.join(useless)}", "app")
    return None


def _options(flags: BatchFlags, ray_address: str | None, created: int | None) -> BatchOptions:
    """Return what to run, and how. Raises `ConfigError` naming a flag."""
    from cluster.batch.io.manifest import Style
    from cluster.batch.row_tasks import ColumnOptions, RowKind
    from cluster.batch.run.loop import RunLimits
    from deploy.batch.command import BatchOptions

    return BatchOptions(
        inputs=tuple(flags.inputs),
        output=flags.output,
        kind=named(RowKind, flags.row_format, "format"),
        style=named(Style, flags.output_format, "output_format"),
        ledger=flags.ledger,
        columns=ColumnOptions(
            prompt_column=flags.prompt_column,
            messages_column=flags.messages_column,
            template=flags.template,
            chat=flags.chat,
            system=flags.system,
            id_column=flags.id_column,
            max_tokens=flags.max_tokens,
            temperature=flags.temperature,
            params=body_fields(flags.params),
        ),
        answer_column=flags.answer_column,
        stdin_suffix=flags.stdin_suffix,
        share=None if flags.app is None else flags.share,
        limits=RunLimits(flags.max_errors, flags.max_cost_tokens, flags.lookahead),
        resume=flags.resume,
        dry_run=flags.dry_run,
        ray_address=ray_address,
        log_interval=flags.log_interval,
        created=created,
        verbose=flags.verbose,
    )


def body_fields(text: str | None) -> Mapping[str, Any]:
    """Return fields of every request: those of `text`, a JSON object. Raises `ConfigError` where it is none."""
    if text is None:
        return {}
    try:
        fields = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{NO_OBJECT}: {error}", "params") from None
    if not isinstance(fields, dict):
        raise ConfigError(NO_OBJECT, "params")
    return fields


def named(kind: type[Kind], name: str | None, option: str) -> Kind | None:
    """Return the kind of that name, None without one. Raises `ConfigError` naming the flag."""
    if name is None:
        return None
    if name not in [*kind]:
        raise ConfigError(f"{option} must be {' or '.join(kind)}, not {name!r}", option)
    return kind(name)
