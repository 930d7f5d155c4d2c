"""A picture as tables for a terminal of 80 columns and up, and as plain lines for everything else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deploy.cli.look import head, notice, pairs, plain_word, share_bar, table_of
from deploy.status import HEADS, STYLES, StatusReport, detail
from deploy.top.picture import ModelPicture, Percentiles, Picture, ReplicaPicture, TenantPicture

TENANTS = 10  # that are shown, those with most devices
IDLE = "(idle)"


def screen(picture: Picture) -> RenderableType:
    """Return the picture for a terminal."""
    report = picture.report
    parts: list[RenderableType] = [_head(picture)]
    for model in picture.models:
        parts += [Text(), _model(model, report)]
    if picture.replicas:
        parts += [Text(), _replicas(picture.replicas, several=len(report.models) > 1)]
    if picture.tenants:
        parts += [Text(), _tenants(picture.tenants)]
    if report.notice:
        parts += [Text(), notice(report.notice)]
    return Group(*parts)


def lines(picture: Picture) -> list[str]:
    """Return the picture as a line for the app and one for each model, replica and tenant, `name=value`."""
    report = picture.report
    word = plain_word(HEADS[report.condition][0])
    seconds = None if picture.seconds is None else f"{picture.seconds:.1f}"
    app = {"seconds": seconds, "routers": report.routers, "heard": picture.heard or None, "notice": report.notice}
    return [
        " ".join([word, report.address, *pairs(app)]),
        *(_model_line(model) for model in picture.models),
        *(_replica_line(replica) for replica in picture.replicas),
        *(_tenant_line(tenant) for tenant in picture.tenants),
    ]


def _head(picture: Picture) -> Text:
    report = picture.report
    word, style = HEADS[report.condition]
    said = [report.address]
    if report.condition.told:
        routers = report.routers or picture.heard
        missed = f" ({picture.heard} heard)" if picture.heard < routers and picture.seconds else ""
        said.append(f"{routers} router{'' if routers == 1 else 's'}{missed}")
        said.append("first look" if picture.seconds is None else f"the last {picture.seconds:.1f} s")
    return head(word, style, *said)


def _model(model: ModelPicture, report: StatusReport) -> RenderableType:
    states = Counter(line.state for line in report.replicas if line.model in ("", model.model))
    title = Text.assemble((model.model, "bold"), "  ")
    for state, number in states.items():
        title.append(f"{number} {state}  ", STYLES.get(state, ""))
    if model.moved:
        title.append(f"{model.moved} moved", "cyan")
    left = Table.grid(padding=(0, 2, 0, 0))
    for name, *figures in _loads(model):
        left.add_row(Text(name, style="dim"), *figures)
    both = Table.grid(padding=(0, 4, 0, 0))
    both.add_row(left, _latencies(model))
    return Group(title, both)


def _loads(model: ModelPicture) -> list[tuple[str, RenderableType, RenderableType]]:
    failed = Text(f"{_number(model.failed)}/s failed", style="bold red" if model.failed else "dim")
    refused = Text(f"{_number(model.refused)}/s refused", style="yellow" if model.refused else "dim")
    hits = "-" if model.cache_hits is None else f"{model.cache_hits:.0%} of prompts"
    return [
        ("requests", f"{_number(model.requests)}/s", failed),
        ("", f"{model.live} live, {model.queued} queued", refused),
        ("tokens", f"{_number(model.prompt_tokens)}/s in", f"{_number(model.generation_tokens)}/s out"),
        ("cached", hits, ""),
    ]


def _latencies(model: ModelPicture) -> Table:
    shown = table_of(("",), ("p50", "p95", "p99"))
    for name, found in (("TTFT", model.ttft), ("ITL", model.itl), ("TPOT", model.tpot)):
        times = ("-",) * 3 if found is None else tuple(map(_time, (found.p50, found.p95, found.p99)))
        shown.add_row(Text(name, style="dim"), *times)
    return shown


def _replicas(replicas: Sequence[ReplicaPicture], several: bool) -> Table:
    texts = ("Replica", *(("Model",) if several else ()), "State")
    shown = table_of(texts, ("Run", "Wait", "In/s", "Out/s", "Cached"))
    shown.add_column("KV cache", no_wrap=True)
    shown.add_column("", overflow="fold")
    for replica in replicas:
        line = replica.line
        said = detail(line)
        if replica.preemptions:
            said = ", ".join(filter(None, [said, f"{replica.preemptions} preempted"]))
        shown.add_row(
            *([line.name or "-"] + ([line.model] if several else [])),
            Text(line.state, STYLES.get(line.state, "")),
            *("" if load is None else str(load) for load in (line.running, line.waiting)),
            *(_number(rate) for rate in (replica.prompt_tokens, replica.generation_tokens)),
            "" if replica.cache_hits is None else f"{replica.cache_hits:.0%}",
            "" if line.kv_usage is None else share_bar(line.kv_usage),
            Text(said, style="dim"),
        )
    return shown


def _tenants(tenants: Sequence[TenantPicture]) -> Table:
    shown = table_of(("Tenant",), ("Req/s", "Refused/s", "In/s", "Out/s", "Queued", "Devices"))
    named = [one for one in tenants if one.tenant]
    for one in named[:TENANTS]:
        rates = (one.requests, one.refused, one.prompt_tokens, one.generation_tokens)
        shown.add_row(one.tenant, *map(_number, rates), str(one.queued), f"{one.devices:.2f}")
    for one in tenants:
        if not one.tenant:
            shown.add_row(*(Text(cell, style="dim") for cell in (IDLE, "", "", "", "", "", f"{one.devices:.2f}")))
    if len(named) > TENANTS:
        shown.add_row(Text(f"and {len(named) - TENANTS} more", style="dim"))
    return shown


def _number(value: float | None) -> str:
    """A rate with three digits that say something."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"


def _model_line(model: ModelPicture) -> str:
    values: dict[str, object] = {
        "requests": f"{model.requests:.2f}/s",
        "failed": f"{model.failed:.2f}/s",
        "refused": f"{model.refused:.2f}/s",
        "in": f"{model.prompt_tokens:.1f}/s",
        "out": f"{model.generation_tokens:.1f}/s",
        "live": model.live,
        "queued": model.queued,
        "cached": None if model.cache_hits is None else f"{model.cache_hits:.0%}",
        "moved": model.moved,
    }
    for name, found in (("ttft", model.ttft), ("itl", model.itl), ("tpot", model.tpot)):
        values[name] = None if found is None else _three(found)
    return " ".join(["model", model.model, *pairs(values)])


def _three(found: Percentiles) -> str:
    return "/".join(f"{seconds * 1000:.1f}" for seconds in (found.p50, found.p95, found.p99)) + "ms"


def _replica_line(replica: ReplicaPicture) -> str:
    line = replica.line
    values = {
        "model": line.model,
        "running": line.running,
        "waiting": line.waiting,
        "kv": None if line.kv_usage is None else f"{line.kv_usage:.0%}",
        "in": None if replica.prompt_tokens is None else f"{replica.prompt_tokens:.1f}/s",
        "out": None if replica.generation_tokens is None else f"{replica.generation_tokens:.1f}/s",
        "preempted": replica.preemptions or None,
    }
    return " ".join(["replica", line.name or "-", line.state, *pairs(values)])


def _tenant_line(tenant: TenantPicture) -> str:
    if not tenant.tenant:
        return f"idle devices={tenant.devices:.2f}"
    values = {
        "requests": f"{tenant.requests:.2f}/s",
        "refused": f"{tenant.refused:.2f}/s",
        "in": f"{tenant.prompt_tokens:.1f}/s",
        "out": f"{tenant.generation_tokens:.1f}/s",
        "queued": tenant.queued,
        "devices": f"{tenant.devices:.2f}",
    }
    return " ".join(["tenant", tenant.tenant, *pairs(values)])
