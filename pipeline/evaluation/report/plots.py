"""Plots as SVG text for the report's page, drawn by matplotlib without a display.

Colours are names that the page gives a value to, one in light and one in dark: matplotlib is given stand-ins, which are
replaced in its output. Text stays text. The same data gives the same bytes.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Stand-in -> what the page's style sheet says instead.
INK, GRID = "#010203", "#010204"
SERIES = ("#010205", "#010206", "#010207", "#010208", "#010209", "#01020a")
CSS = {INK: "currentColor", GRID: "var(--grid)"} | {stand_in: f"var(--c{i})" for i, stand_in in enumerate(SERIES, 1)}
WIDTH = 5.0  # inches: 360 points, so that 10-point text can be read on a page of 360 pixels
MANY = 1000  # cells of a heat map beyond which they become one picture instead of a shape each
STYLE: dict[Any, Any] = {
    "figure.dpi": 200,  # of what is drawn as a picture; shapes have none
    "svg.fonttype": "none",
    "svg.hashsalt": "trtseek",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 4,
}


def plot_lines(
    xs: Sequence[float],
    series: Sequence[Sequence[float]],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    dashed: Sequence[int] = (),
) -> str:
    """A line per series over shared `xs`; values that are not finite are gaps."""
    figure, axes = _open(2.6)
    with _style():
        for i, values in enumerate(series):
            drawn = [_number(value) for value in values]
            style = "--" if i in dashed else "-"
            axes.plot(xs, drawn, style, marker="o", color=SERIES[i % len(SERIES)])
        if log_x:
            axes.set_xscale("log", base=2)
            axes.set_xticks(list(xs), [f"{x:g}" for x in xs])
            axes.minorticks_off()
        else:
            _whole_ticks(axes)
        largest = max((v for values in series for v in map(_number, values) if math.isfinite(v)), default=0.0)
        axes.set_ylim(0.0, 1.08 * largest or 1.0)  # distances: zero is part of the picture
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        return _to_svg(figure, f"{y_label} over {x_label}")


def plot_heat_map(
    values: Sequence[Sequence[float | None]], *, rows: Sequence[str], columns: Sequence[str], x_label: str, bar: str
) -> str:
    """A cell per value [rows][columns], darker where larger; None is left empty."""
    import numpy as np

    height = max(1.9, 1.0 + 0.28 * len(rows))
    figure, axes = _open(min(height, 6.0))
    with _style():
        grid = np.array([[_number(v) for v in row] for row in values], dtype=float)
        mesh = axes.pcolormesh(grid, cmap="cividis_r", edgecolors="face", linewidth=0.3)
        mesh.set_rasterized(grid.size > MANY)
        axes.invert_yaxis()
        axes.grid(False)
        _name_cells(axes.set_yticks, rows, most=24)
        _name_cells(axes.set_xticks, columns, most=16)
        axes.set_xlabel(x_label)
        colour_bar = figure.colorbar(mesh, ax=axes, pad=0.02, fraction=0.05)
        colour_bar.set_label(bar)
        colour_bar.outline.set_visible(False)
        return _to_svg(figure, f"heat map: {bar} by {x_label}")


def _name_cells(set_ticks: Any, names: Sequence[str], *, most: int) -> None:
    stride = max(1, -(-len(names) // most))
    places = range(0, len(names), stride)
    set_ticks([place + 0.5 for place in places], [names[place] for place in places])


def _whole_ticks(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _number(value: Any) -> float:
    """NaN for what cannot be drawn: text that spells such a number, or None."""
    return float(value) if isinstance(value, int | float) else math.nan


def _style() -> Any:
    import matplotlib

    return matplotlib.rc_context(STYLE)


def _open(height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    with _style():
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        return figure, figure.subplots()


def _to_svg(figure: Figure, title: str) -> str:
    """The <svg> element alone, as wide as its place, with a title for who cannot see it."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # "axes_1" of every plot: ids are the page's, and none is needed
    text = text.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
    for stand_in, css in CSS.items():
        text = text.replace(stand_in, css)
    return text
