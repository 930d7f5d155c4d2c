"""The flags of `squadron batch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.config import flag
from deploy.cli.flags import ServeCommand, merge_settings
from deploy.serve.environment import Environment, prepare_ray
from engine.errors import ConfigError

ROWS = "Rows"
RUN = "Run"


class BatchCommand(ServeCommand):
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


def batch(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...", help="Files (.jsonl, .csv, .parquet; .gz, .zst), folders, patterns, URLs, or -."
        ),
    ],
    output: Annotated[
        str,
        typer.Argument(
            metavar="OUTPUT",
            help="File of the answers: .jsonl, .csv or .parquet. Failed rows go to a file beside it.",
        ),
    ],
    model: Annotated[str | None, typer.Option("--model", "-m", help="A folder, a hub id, or 'demo'.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings, as for `squadron serve`.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where an earlier run of this output ended; or begin.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check every row, count its tokens, and stop.")] = False,
    app: Annotated[
        str | None, typer.Option("--app", help="Use the replicas of this Serve app, in the cluster of RAY_ADDRESS.")
    ] = None,
    share: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=1.0,
            help="With --app: of its sequences, taken while clients' requests run.",
            rich_help_panel=RUN,
        ),
    ] = 0.25,
    max_errors: Annotated[
        int | None, typer.Option(min=0, help="Stop when more rows than this have failed.", rich_help_panel=RUN)
    ] = None,
    max_cost_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Stop before prompts and output take more tokens.", rich_help_panel=RUN),
    ] = None,
    lookahead: Annotated[
        int,
        typer.Option(
            min=1, help="Rows among which equal beginnings are brought together; 1 = off.", rich_help_panel=RUN
        ),
    ] = 1024,
    ledger: Annotated[
        Path | None,
        typer.Option(help="Folder for what is done so far.", show_default="OUTPUT.ledger", rich_help_panel=RUN),
    ] = None,
    log_interval: Annotated[
        float,
        typer.Option(min=0.1, help="Seconds between lines of progress without a terminal.", rich_help_panel=RUN),
    ] = 10.0,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show Ray's own logs.", rich_help_panel=RUN)] = False,
    row_format: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="openai|plain", help="What rows are; without it as the first.", rich_help_panel=ROWS
        ),
    ] = None,
    output_format: Annotated[
        str | None,
        typer.Option(
            metavar="openai|columns",
            help="What answers are: lines as OpenAI writes them, or columns beside the input's.",
            show_default="as the rows are",
            rich_help_panel=ROWS,
        ),
    ] = None,
    stdin_suffix: Annotated[
        str, typer.Option(help="What standard input holds, as a file's suffix.", rich_help_panel=ROWS)
    ] = ".jsonl",
    prompt_column: Annotated[
        str, typer.Option(help="Column of the prompt; of text files 'text'.", rich_help_panel=ROWS)
    ] = "prompt",
    messages_column: Annotated[
        str, typer.Option(help="Column of a chat's messages.", rich_help_panel=ROWS)
    ] = "messages",
    template: Annotated[
        str | None,
        typer.Option(help="Prompt made of columns, such as 'Translate: {{ text }}'.", rich_help_panel=ROWS),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's message.", rich_help_panel=ROWS)
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message of every chat.", rich_help_panel=ROWS)] = None,
    id_column: Annotated[
        str, typer.Option(help="Column of ids.", show_default="row-1, row-2, ...", rich_help_panel=ROWS)
    ] = "",
    answer_column: Annotated[
        str, typer.Option(help="Column for the answer in the output.", rich_help_panel=ROWS)
    ] = "answer",
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most tokens of an answer; without it a completion ends after 16, as OpenAI's.",
            rich_help_panel=ROWS,
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0 = always the likeliest token.", rich_help_panel=ROWS)
    ] = None,
    params: Annotated[
        str | None,
        typer.Option(help="Further fields of every request, as JSON: '{\"top_p\": 0.9}'.", rich_help_panel=ROWS),
    ] = None,
    **chosen: Any,
) -> None:
    """Answer every row of INPUT into OUTPUT: each exactly once, whatever is killed meanwhile.

    Rows are requests of OpenAI's batch format, or columns with a prompt. What is done is kept beside OUTPUT until all
    is done: after a crash, the same command with --resume goes on from there, in the middle of answers too.
    """
    environment = Environment.read()
    given = {} if model is None else {"model": model}
    settings = None if app is not None else merge_settings(config, chosen | given)
    if settings is None and (chosen or config is not None):
        useless = ", ".join(["--config"] * (config is not None) + [flag(name) for name in chosen])
        raise ConfigError(f"app: its replicas have their own settings; leave out {useless}", "app")
    ray_address = prepare_ray(environment.ray_address)
    from cluster.batch.output.spec import Style
    from cluster.batch.plain_rows import ColumnOptions
    from cluster.batch.run import RunLimits
    from cluster.batch.tasks import RowKind
    from deploy.batch.command import run_batch
    from deploy.batch.options import BatchOptions, ServedApp, body_fields, named

    columns = ColumnOptions(
        prompt_column=prompt_column,
        messages_column=messages_column,
        template=template,
        chat=chat,
        system=system,
        id_column=id_column,
        max_tokens=max_tokens,
        temperature=temperature,
        params=body_fields(params),
    )
    options = BatchOptions(
        inputs=tuple(inputs),
        output=output,
        kind=named(RowKind, row_format, "format"),
        style=named(Style, output_format, "output_format"),
        ledger=ledger,
        columns=columns,
        answer_column=answer_column,
        stdin_suffix=stdin_suffix,
        share=None if app is None else share,
        limits=RunLimits(max_errors, max_cost_tokens, lookahead),
        resume=resume,
        dry_run=dry_run,
        ray_address=ray_address,
        log_interval=log_interval,
        created=environment.source_date_epoch,
        verbose=verbose,
    )
    run_batch(ServedApp(str(app), model) if settings is None else settings.shared, options)
