"""The flags of `squadron plan`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

LOAD = "Load"
USUAL_INPUT = "1024, where the context has room"
USUAL_OUTPUT = "256, where the context has room"


def plan(
    model: Annotated[str, typer.Argument(help="A folder, a hub id, or 'demo'; only its config is read.")],
    gpu: Annotated[str, typer.Option(help="Kind of GPU, such as H200; for an unknown one all are named.")],
    input_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt.", show_default=USUAL_INPUT, rich_help_panel=LOAD)
    ] = None,
    output_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of an answer.", show_default=USUAL_OUTPUT, rich_help_panel=LOAD)
    ] = None,
    rps: Annotated[float | None, typer.Option(help="Requests a second, at the peak.", rich_help_panel=LOAD)] = None,
    ttft: Annotated[float | None, typer.Option(help="Most seconds to the first token.", rich_help_panel=LOAD)] = None,
    tpot: Annotated[float | None, typer.Option(help="Most seconds between two tokens.", rich_help_panel=LOAD)] = None,
    roofline_share: Annotated[
        float, typer.Option(help="Part of the data sheets' speed that is counted on.", rich_help_panel=LOAD)
    ] = 0.5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    **chosen: Any,
) -> None:
    """Say what MODEL needs of GPUs: memory, tokens that fit, least times, replicas for a load. Needs no GPU.

    Exit code: 0 = it fits; 1 = it does not, and the nearest that does is named.
    """
    from deploy.capacity.command import show_plan
    from deploy.capacity.load import Wanted

    wanted = Wanted(input_len, output_len, rps, ttft, tpot, roofline_share)
    show_plan({"model": model, **chosen}, gpu, wanted, as_json)
