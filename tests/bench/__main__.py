"""`make bench`: run the benchmarks, print a table, write bench.json.

    python -m tests.bench [--only MODULE ...] [--output bench.json]

With `--only`, figures of the others stay in the file as they were.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from tests.bench.machine import provenance

MODULES = (
    "host_step",
    "channel",
    "router",
    "router_scale",
    "routing",
    "openai_stream",
    "grpc_stream",
    "served",
    "offline",
    "peers",
    "peers.served",
)


@dataclass(frozen=True, slots=True)
class Headline:
    """A figure under its name in bench.json: where `measure()` has it, its unit, and what to aim at on 2 cores.

    optional: whether it needs what is not installed everywhere, so that it may not be there.
    """

    module: str
    path: tuple[str, ...]
    unit: str
    aim: str
    optional: bool = False


HEADLINES = {
    "host_step_us_256": Headline("host_step", ("256", "median"), "us", "at most 60"),
    "channel_4kb_us": Headline("channel", ("ring_4kb_us",), "us", "at most 20"),
    "router_tokens_per_s_32": Headline("router", ("router_tokens_per_s_32",), "tokens/s", "at least 20,000"),
    "router_tokens_per_chunk_32": Headline("router", ("router_tokens_per_chunk_32",), "tokens", ""),
    "router_single_tokens_per_s_32": Headline("router", ("router_single_tokens_per_s_32",), "tokens/s", ""),
    "router_choice_us_p50_128": Headline("router_scale", ("choice_us_median",), "us", "tens"),
    "router_saturated_tokens_per_s": Headline("router_scale", ("saturated_tokens_per_s",), "tokens/s", ""),
    "routing_hit_rate_of_oracle": Headline("routing", ("shared", "kv_aware", "hit_rate_of_oracle"), "x", ""),
    "routing_vs_round_robin": Headline("routing", ("vs_round_robin",), "x tokens/s", ""),
    "routing_vs_ray_affinity": Headline("routing", ("vs_ray_affinity",), "x tokens/s", ""),
    "wire_tokens_per_s_32": Headline("openai_stream", ("wire_tokens_per_s_32",), "tokens/s", "at least 20,000"),
    "grpc_tokens_per_s_32": Headline("grpc_stream", ("grpc_tokens_per_s_32",), "tokens/s", "at least 10,000"),
    "router_added_ttft_ms": Headline("served", ("router_added_ttft_ms_1",), "ms", ""),
    "served_tokens_per_s_32": Headline("served", ("served_tokens_per_s_32",), "tokens/s", ""),
    "offline_demo_tokens_per_s": Headline("offline", ("offline_demo_tokens_per_s",), "tokens/s", ""),
    "offline_vs_transformers_static": Headline(
        "offline", ("offline_vs_transformers_static",), "x (fp32)", "at least 3.0"
    ),
    "offline_vs_transformers_even": Headline("offline", ("offline_vs_transformers_even",), "x (fp32)", ""),
    "offline_vs_transformers_continuous": Headline(
        "offline", ("offline_vs_transformers_continuous",), "x (fp32)", ""
    ),
    "offline_vs_transformers_alone": Headline("offline", ("offline_vs_transformers_alone",), "x (fp32)", ""),
    "cpu_matrix_share": Headline("peers", ("squadron_matrix_share_float32",), "% of the peak (fp32)", ""),
    "cpu_alone_readings": Headline("peers", ("squadron_readings_float32",), "x reading the weights (fp32)", ""),
    **{
        f"vs_{peer}_{name}": Headline("peers", (f"vs_{peer}_{figure}_float32",), "x (fp32)", "", optional=True)
        for peer in ("vllm", "openvino_genai", "llama_cpp")
        for name, figure in (("mixed", "mixed_tokens_per_s"), ("alone", "alone_ms"))
    },
    **{
        f"served_vs_{peer}_{name}": Headline(
            "peers.served",
            (f"vs_{server}_{figure}_32_streams_1_replicas_float32",),
            f"x {unit} (fp32)",
            "",
            optional=True,
        )
        for peer, server in (("vllm", "vllm_serve"), ("ray_llm", "ray_serve_llm"))
        for name, figure, unit in (
            ("32", "tokens_per_s", "tokens/s"),
            ("ttft_32", "ttft_ms", "sooner"),
            ("cpu_32", "cpu_s_per_1000", "less CPU"),
        )
    },
}


def flat(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number of nested figures with its dotted name."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", float(value)


def at(figures: Mapping[str, Any], path: tuple[str, ...]) -> float:
    """Return the figure at `path`; a KeyError names what a benchmark no longer measures."""
    value: Any = figures
    for name in path:
        value = value[name]
    return float(value)


def run_module(name: str, known: dict[str, Any]) -> None:
    """Run one benchmark and put its figures into `known`: the headlines by name, all of them under `details`."""
    origin = provenance()
    figures = importlib.import_module(f"tests.bench.{name}").measure()
    for key, headline in HEADLINES.items():
        if headline.module != name:
            continue
        if headline.optional and headline.path[0] not in figures:
            known.pop(key, None)  # of an earlier run
        else:
            known[key] = {"value": at(figures, headline.path), "unit": headline.unit, **origin}
    known.setdefault("details", {})[name] = {"figures": dict(flat(figures)), **origin}


def headline_table(known: Mapping[str, Any]) -> Table:
    """Lay out the figures that have a name in bench.json."""
    result = Table("figure", Column("value", justify="right"), "unit", "aim", title="Squadron")
    for key, headline in HEADLINES.items():
        if key in known:
            result.add_row(key, f"{known[key]['value']:,.1f}", headline.unit, headline.aim)
    return result


def detail_table(known: Mapping[str, Any]) -> Table:
    """Lay out everything else that was measured."""
    result = Table(Column("detail", no_wrap=True), Column("value", justify="right"))
    for details in known.get("details", {}).values():
        result.add_section()
        for figure, value in details["figures"].items():
            if figure not in HEADLINES:
                result.add_row(figure, f"{value:,.2f}")
    return result


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODULES, default=MODULES)
    parser.add_argument("--output", type=Path, default=Path("bench.json"))
    options = parser.parse_args()
    console = Console()
    known = json.loads(options.output.read_text()) if options.output.is_file() else {}
    for name in options.only:
        with console.status(f"{name} ..."):
            run_module(name, known)
        # Written after each: an interrupted run keeps what it has.
        options.output.write_text(json.dumps(known, indent=2) + "\n")
    console.print(headline_table(known), detail_table(known))
    machine = provenance()["machine"]
    console.print(f"{machine['cpu']}, {machine['cores']} cores; written to {options.output}", highlight=False)


if __name__ == "__main__":
    main()
