"""Draws a dashboard's panels from what a Prometheus answers, where Grafana would put them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter
from PIL import Image

from deploy.observability.grafana import COLUMNS, Dashboard, Panel, places
from tests.bench.prometheus import Line

INCHES = (18 / COLUMNS, 0.34)  # of one cell of the grid
HEADING = 1  # cells above each row
COLOURS = (
    *("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c"),
    *("#b877d9", "#37872d", "#8ab8ff", "#fade2a", "#a352cc"),
)
PAPER, CARD, INK, FAINT, GRID = "#111217", "#181b1f", "#ccccdc", "#8e8e9e", "#2c2e36"
LEGEND = 6  # series that are named; those that are 0 throughout come last
DOTS, SHADES = 72, 200  # an inch; colours of the picture: few, so that it stays small
Answer = Callable[[str], list[Line]]
Drawn = tuple[str, Line]


def draw(dashboard: Dashboard, answer: Answer, file: Path) -> list[str]:
    """Write the picture, and return the titles of the panels that are empty. answer: gives a query's series."""
    mpl.rcParams.update({"text.color": INK, "axes.labelcolor": FAINT, "xtick.color": FAINT, "ytick.color": FAINT})
    rows = [(row, places(row)) for row in dashboard.rows]
    height = sum(HEADING + max(one["y"] + one["h"] for one in place) for _, place in rows) + 2
    figure = Figure(figsize=(COLUMNS * INCHES[0], height * INCHES[1]), facecolor=PAPER)
    figure.text(0.006, 1 - 0.9 / height, dashboard.title, fontsize=17, weight="bold", va="center")
    empty, top = [], 2
    for row, place in rows:
        figure.text(0.006, 1 - (top + 0.6) / height, row.title, fontsize=12, weight="bold", va="center")
        top += HEADING
        for panel, at in zip(row.panels, place, strict=True):
            box = (at["x"] / COLUMNS, 1 - (top + at["y"] + at["h"]) / height, at["w"] / COLUMNS, at["h"] / height)
            drawn = [(legend_of(query.legend, line), line) for query in panel.queries for line in answer(query.expr)]
            drawn.sort(key=lambda one: not any(value > 0 for _, value in one[1].points))
            if not any(math.isfinite(value) for _, line in drawn for _, value in line.points):
                empty.append(panel.title)
            _panel(figure, panel, box, drawn)
        top += max(one["y"] + one["h"] for one in place)
    drawing = BytesIO()
    figure.savefig(drawing, dpi=DOTS, facecolor=PAPER)
    Image.open(drawing).convert("RGB").quantize(SHADES).save(file, optimize=True)
    return empty


def legend_of(legend: str, line: Line) -> str:
    """Return a legend with the values of its labels."""
    return " ".join(re.sub(r"{{(\w+)}}", lambda found: line.labels.get(found[1], ""), legend).split())


def _panel(figure: Figure, panel: Panel, box: tuple[float, float, float, float], drawn: Sequence[Drawn]) -> None:
    left, bottom, width, height = box
    gap = (0.002, 0.02 * height)
    card = Rectangle((left + gap[0], bottom + gap[1]), width - 2 * gap[0], height - 2 * gap[1], color=CARD, zorder=-1)
    figure.add_artist(card)
    if panel.kind == "stat":
        axes = figure.add_axes((left + 0.006, bottom + 0.08 * height, width - 0.012, 0.66 * height), facecolor=CARD)
        _stat(axes, panel, drawn)
    else:
        inner = (left + 0.038, bottom + 0.31 * height, width - 0.048, 0.53 * height)
        axes = figure.add_axes(inner, facecolor=CARD)
        _time_series(axes, panel, drawn)
    figure.text(left + 0.006, bottom + 0.91 * height, panel.title, fontsize=10, weight="bold", va="center")


def _stat(axes: Axes, panel: Panel, drawn: Sequence[Drawn]) -> None:
    axes.set_axis_off()
    values = [value for _, line in drawn for _, value in line.points if math.isfinite(value)]
    colour = INK if not values else _colour(panel, values[-1])
    for _, line in drawn:
        axes.fill_between(*zip(*line.points, strict=True), color=colour, alpha=0.2, linewidth=0)
    axes.set_ylim(bottom=0)
    text = shown(values[-1], panel.unit) if values else "no data"
    axes.text(0.5, 0.5, text, fontsize=22, color=colour, ha="center", va="center", transform=axes.transAxes)


def _colour(panel: Panel, value: float) -> str:
    if panel.alarm is not None and value >= panel.alarm:
        return "#f2495c"
    return "#ff9830" if panel.warn is not None and value >= panel.warn else "#73bf69"


def _time_series(axes: Axes, panel: Panel, drawn: Sequence[Drawn]) -> None:
    axes.grid(color=GRID, linewidth=0.6)
    axes.tick_params(labelsize=8, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    (_stack if panel.stacked else _lines)(axes, drawn)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, panel.unit)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: _clock(at)))
    axes.set_ylim(0, panel.top)
    for limit in (panel.warn, panel.alarm):
        if limit is not None and limit < axes.get_ylim()[1]:
            axes.axhline(limit, color="#ff9830", linewidth=0.8, linestyle="--")
    if not drawn:
        axes.text(0.5, 0.5, "no data", fontsize=10, color=FAINT, ha="center", transform=axes.transAxes)
        return
    handles, names = axes.get_legend_handles_labels()
    axes.legend(
        handles[:LEGEND],
        names[:LEGEND],
        fontsize=7.5,
        loc="upper left",
        bbox_to_anchor=(-0.12, -0.13),
        ncols=2 if max(map(len, names[:LEGEND])) > 15 else 3,
        frameon=False,
        labelcolor=FAINT,
        handlelength=1.0,
        columnspacing=1.0,
        labelspacing=0.2,
    )


def _lines(axes: Axes, drawn: Sequence[Drawn]) -> None:
    for number, (name, line) in enumerate(drawn):
        colour = COLOURS[number % len(COLOURS)]
        at, values = zip(*line.points, strict=True)
        axes.plot(at, values, color=colour, linewidth=1.2, label=name)
        axes.fill_between(at, values, color=colour, alpha=0.06, linewidth=0)


def _stack(axes: Axes, drawn: Sequence[Drawn]) -> None:
    """What a series does not tell at a moment counts as nothing there."""
    times = sorted({at for _, line in drawn for at, _ in line.points})
    below = [0.0] * len(times)
    for number, (name, line) in enumerate(drawn):
        own = {at: value for at, value in line.points if math.isfinite(value)}
        above = [base + own.get(at, 0.0) for at, base in zip(times, below, strict=True)]
        colour = COLOURS[number % len(COLOURS)]
        axes.fill_between(times, below, above, color=colour, alpha=0.45, linewidth=0.8, label=name)
        below = above


def shown(value: float, unit: str) -> str:
    """Return a value as Grafana shows it: with its unit, and few digits."""
    if unit == "percentunit":
        return f"{value:.3g}%" if value == 0 else f"{value * 100:.3g}%"
    if unit == "s":
        return _scaled(value, ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")))
    if unit == "bytes":
        return _scaled(value, ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")))
    number = _scaled(value, ((1e6, "M"), (1e3, "K"), (1.0, "")), "") if abs(value) >= 1000 else f"{value:.3g}"
    return f"{number} req/s" if unit == "reqps" else number + unit.partition(":")[2].replace("tokens/s", "tok/s")


def _scaled(value: float, scales: Sequence[tuple[float, str]], gap: str = " ") -> str:
    if value == 0:
        return "0"
    scale, name = next((one for one in scales if abs(value) >= one[0]), scales[-1])
    return f"{value / scale:.3g}{gap}{name}"


def _clock(at: float) -> str:
    minutes, seconds = divmod(int(at) % 3600, 60)
    return f"{minutes:02d}:{seconds:02d}"
