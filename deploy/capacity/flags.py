"""The flags of `squadron plan`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from deploy.cli.wrong_values import seconds

LOAD = "Load"
USUAL_INPUT = "1024, or what the context allows"
USUAL_OUTPUT = "256, or what the context allows"
USUAL_SHARE = "as measured on an H100: 0.85 of bandwidth, 0.59 of operations"


def plan(
    model: Annotated[str, typer.Argument(help="A folder, a hub id, or 'demo'; only its config is read.")],
    gpu: Annotated[
        str,
        typer.Option(help="Kind of GPU, such as H200, or auto for the least memory. An unknown name lists all."),
    ],
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="GPUs of a node; a larger group is counted over InfiniBand.",
            show_default="as many as NVLink or PCIe joins, mostly 8",
        ),
    ] = None,
    input_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt.", show_default=USUAL_INPUT, rich_help_panel=LOAD)
    ] = None,
    output_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of an answer.", show_default=USUAL_OUTPUT, rich_help_panel=LOAD)
    ] = None,
    rps: Annotated[float | None, typer.Option(help="Requests per second at the peak.", rich_help_panel=LOAD)] = None,
    ttft: Annotated[
        float | None,
        typer.Option(
            help="Maximum seconds to the first token, on average.",
            parser=seconds,
            metavar="<float>",
            rich_help_panel=LOAD,
        ),
    ] = None,
    tpot: Annotated[
        float | None,
        typer.Option(
            help="Maximum seconds between two tokens, on average.",
            parser=seconds,
            metavar="<float>",
            rich_help_panel=LOAD,
        ),
    ] = None,
    headroom: Annotated[
        float, typer.Option(help="Share of a replica's rate that is kept free for bursts.", rich_help_panel=LOAD)
    ] = 0.2,
    spare_replicas: Annotated[
        int, typer.Option(help="Replicas that may be lost at the peak.", rich_help_panel=LOAD)
    ] = 1,
    roofline_share: Annotated[
        float | None,
        typer.Option(
            help="Share of the data sheets' speed to expect.", show_default=USUAL_SHARE, rich_help_panel=LOAD
        ),
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Also run the load through the scheduler, in virtual time.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    **chosen: Any,
) -> None:
    """Show what MODEL needs of GPUs: memory, tokens that fit, times, replicas for a load. Needs no GPU.

    Exit code: 0 = it fits; 1 = it does not, and the nearest settings that fit are printed.
    """
    from deploy.capacity.load import Wanted
    from deploy.capacity.plan import Shown, show_plan

    wanted = Wanted(input_len, output_len, rps, ttft, tpot, roofline_share, headroom, spare_replicas)
    show_plan({"model": model, **chosen}, gpu, wanted, Shown(as_json, gpus_per_node, simulate))
