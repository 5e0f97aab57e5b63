"""Plots of comparisons: ratios with their intervals, the winner marked. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.cli.bench.harness.comparison import Comparison

WINNER, OTHER, BASELINE = "#1a7f37", "#57606a", "#bbbbbb"
PANELS_IN_A_ROW = 3
WIDE = 10.0
"""Ratios that differ by more than that have a logarithmic scale: bars begin at 1 there."""


def draw_comparisons(path: Path, title: str, comparisons: Sequence[Comparison]) -> None:
    """Draw a panel for each comparison: how many times as fast as the baseline, with intervals."""
    figure, panels = subplots(len(comparisons), max(len(c.times_ms) for c in comparisons))
    for panel, comparison in zip(panels, comparisons, strict=False):
        draw_panel(panel, comparison)
    save(figure, path, title)


def draw_panel(panel: Any, comparison: Comparison) -> None:
    """Draw one comparison as bars."""
    from matplotlib.ticker import FuncFormatter

    names, winners = list(comparison.times_ms), comparison.winners
    found = [comparison.speed(name) for name in names]
    errors = [[e.value - e.low for e in found], [e.high - e.value for e in found]]
    is_wide = max(e.high for e in found) > WIDE * min(e.low for e in found) > 0
    colors = [
        WINNER if name in winners else BASELINE if name == comparison.baseline else OTHER
        for name in names
    ]
    # Of ratios from 0.1 to 100 a usual scale shows the large ones only.
    left = 1.0 if is_wide else 0.0
    widths = [e.value - left for e in found]
    panel.barh(range(len(names)), widths, left=left, xerr=errors, color=colors, capsize=3)
    if is_wide:
        panel.set_xscale("log")
        ticks = FuncFormatter(lambda value, _: f"{value:g}")
        panel.xaxis.set_major_formatter(ticks)
    for place, (name, each) in enumerate(zip(names, found, strict=True)):
        star = " ★" if name in winners else ""
        panel.annotate(
            f"{each.value:.2f}{star}",
            (each.high, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.invert_yaxis()
    panel.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    panel.margins(x=0.2)
    panel.set_title(comparison.title, fontsize=9)
    panel.set_xlabel(f"x as fast as {comparison.baseline}", fontsize=8)


def subplots(count: int, bars: int) -> tuple[Any, list[Any]]:
    """Return a figure and so many panels, each with room for so many bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(count, PANELS_IN_A_ROW)
    rows = -(-count // columns)
    size = (5 * columns, rows * (1.4 + 0.35 * bars))
    figure, grid = pyplot.subplots(rows, columns, figsize=size, squeeze=False)
    panels = list(grid.flat)
    for unused in panels[count:]:
        unused.set_visible(False)
    return figure, panels


def save(figure: Any, path: Path, title: str) -> None:
    """Write a figure and let go of it."""
    from matplotlib import pyplot

    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
