"""Curves of one or several runs, as a picture (PNG) and as an interactive page (HTML).

The page works offline. planish/runlog/curves.py chooses the metrics. Picture and page show the same
panels, with a color for each run and a line style for each metric.
"""

import colorsys
import html
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from planish.errors import UserError
from planish.files import Row, write_atomically
from planish.runlog.curves import (
    Curve,
    PlottedPanel,
    Run,
    panels_to_draw,
    points_by_metric,
    read_runs,
)

PNG_FILE = "curves.png"
HTML_FILE = "curves.html"


def plot_runs(
    paths: Sequence[str | Path],
    out: str | Path | None = None,
    *,
    metrics: Sequence[str] | None = None,
    smooth: int = 1,
) -> tuple[Path, Path]:
    """Write curves.png and curves.html into the directory `out`, and return their paths.

    If `out` is None, the files go to the run's directory, or for several runs to the working
    directory. `metrics` are names or patterns such as "test/*", one for each panel. With None, the
    default panels are drawn (`curves.PANELS`). With `smooth` > 1, the mean over the last `smooth`
    steps is drawn as well. Raises UserError for a path without a run, or a metric that no run has.
    """
    if not paths:
        raise UserError("there is no run to plot; give the log_path of at least one")
    if smooth < 1:
        raise UserError(f"smooth={smooth}: give a number of steps, at least 1")
    runs = read_runs([Path(path).expanduser() for path in paths])
    panels = panels_to_draw(runs, metrics, smooth)
    if out is None:
        directory = runs[0].path.parent if len(runs) == 1 else Path()
    else:
        directory = Path(out).expanduser()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"out={directory}: {error}; give a directory that can be written to"
        ) from error
    write_atomically(directory / PNG_FILE, _png_picture(panels, runs))
    write_atomically(directory / HTML_FILE, _html_page(panels, runs))
    return directory / PNG_FILE, directory / HTML_FILE


def draw_curve(
    path: str | Path, rows: Iterable[Row], names: Sequence[str] = ("reward/total",), *, title: str
) -> bool:
    """Write a PNG of the metrics `names` over the steps. Rows without a metric are skipped. Return
    False, without a file, if no row has any of the metrics.
    """
    points = points_by_metric(rows)
    points_to_draw = {name: points[name] for name in names if name in points}
    if not points_to_draw:
        return False
    figure = _figure(8, 4.5)
    axes = figure.add_subplot()
    for name, values in points_to_draw.items():
        axes.plot(list(values), list(values.values()), marker="o", markersize=3, label=_label(name))
    axes.set(title=_label(title), xlabel="step")
    axes.grid(alpha=0.3)
    axes.legend()
    write_atomically(path, _png(figure))
    return True


_COLORS = (
    "#1f77b4",
    "#d62728",
    "#2ca02c",
    "#9467bd",
    "#ff7f0e",
    "#17becf",
    "#8c564b",
    "#e377c2",
    "#7f7f7f",
    "#bcbd22",
)
_PNG_DASHES = ("-", "--", ":", "-.")
_HTML_DASHES = ("solid", "dash", "dot", "dashdot")
_HTML_LEGEND_MARKS = ("━━", "╍╍", "┉┉", "━┉")


def _color(index: int, count: int) -> str:
    if count <= len(_COLORS):
        return _COLORS[index]
    red, green, blue = colorsys.hsv_to_rgb(index / count, 0.8, 0.75)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _grid(panels: int) -> tuple[int, int]:
    columns = 1 if panels == 1 else 2 if panels <= 4 else 3
    return -(-panels // columns), columns


def _png_picture(panels: Sequence[PlottedPanel], runs: Sequence[Run]) -> bytes:
    rows, columns = _grid(len(panels))
    figure = _figure(5.0 * columns, 3.2 * rows + 0.4)
    lines: dict[int, Any] = {}
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, index + 1)
        for curve in panel.curves:
            lines[curve.run_index] = _draw(axes, curve, _color(curve.run_index, len(runs)))
        _finish_axes(axes, panel)
    if len(runs) == 1:
        figure.suptitle(_label(runs[0].name), fontsize=11)
    else:
        labels = [_label(runs[index].name) for index in lines]
        figure.legend(lines.values(), labels, loc="outside lower center", ncols=columns, fontsize=8)
    return _png(figure)


def _draw(axes: Any, curve: Curve, color: str) -> Any:
    """Draw a curve, and return the line that represents its run in the legend."""
    style = {"color": color, "linestyle": _PNG_DASHES[curve.key_index % 4]}
    marker = "o" if len(curve.x) <= 40 else ""
    if curve.smoothed_y is None:
        [line] = axes.plot(curve.x, curve.y, marker=marker, markersize=3, **style)
    else:
        axes.plot(curve.x, curve.y, marker=marker, markersize=2, linewidth=0.8, alpha=0.3, **style)
        [line] = axes.plot(curve.x, curve.smoothed_y, **style)
    return line


def _finish_axes(axes: Any, panel: PlottedPanel) -> None:
    keys = panel.keys
    key_suffix = f": {keys[0]}" if len(keys) == 1 and keys != [panel.title] else ""
    axes.set_title(_label(panel.title + key_suffix), fontsize=9)
    axes.set_xlabel("step", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    if panel.is_logarithmic:
        axes.set_yscale("log")
    if len(keys) > 1:
        handles = [
            axes.plot([], [], color="black", linestyle=_PNG_DASHES[i % 4])[0]
            for i in range(len(keys))
        ]
        axes.legend(handles, [_label(key) for key in keys], fontsize=7)


def _label(text: str) -> str:
    """Escape a text for matplotlib, which reads text between dollar signs as a formula and hides
    labels that begin with an underscore.
    """
    escaped = text.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def _figure(width: float, height: float) -> Any:
    # matplotlib takes seconds to import, and only pictures need it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Any) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _html_page(panels: Sequence[PlottedPanel], runs: Sequence[Run]) -> str:
    from plotly.subplots import make_subplots  # takes a second to import; only pages need it

    rows, columns = _grid(len(panels))
    titles = [_html_title(panel) for panel in panels]
    figure: Any = make_subplots(rows, columns, subplot_titles=titles, vertical_spacing=0.25 / rows)
    in_legend: set[int] = set()
    for index, panel in enumerate(panels):
        cell = {"row": index // columns + 1, "col": index % columns + 1}
        for curve in panel.curves:
            is_new = curve.run_index not in in_legend
            in_legend.add(curve.run_index)
            for trace in _traces(curve, _color(curve.run_index, len(runs)), is_new):
                figure.add_scatter(**trace, **cell)
        if panel.is_logarithmic:
            figure.update_yaxes(type="log", exponentformat="power", **cell)
    figure.update_xaxes(matches="x", showticklabels=True)
    height = 340 * rows + 100
    legend = {"orientation": "h", "yref": "container", "y": 1, "yanchor": "top"}
    figure.update_layout(
        height=height, template="plotly_white", margin={"t": 100}, legend=legend, showlegend=True
    )
    config = {"responsive": True, "displaylogo": False}
    plots = figure.to_html(full_html=False, include_plotlyjs=True, div_id="curves", config=config)
    run_rows = "".join(_row(run) for run in runs)
    return _HTML_TEMPLATE.format(
        title=html.escape(", ".join(run.name for run in runs)), run_rows=run_rows, plots=plots
    )


_HTML_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 14px sans-serif; margin: 1em }} td, th {{ text-align: left; padding-right: 2em }}</style></head>
<body><table><tr><th>run</th><th>steps</th><th>file</th></tr>{run_rows}</table>
{plots}
</body></html>
"""


def _row(run: Run) -> str:
    steps = len({step for points in run.points.values() for step in points})
    return f"<tr><td>{html.escape(run.name)}</td><td>{steps}</td><td>{html.escape(str(run.path))}</td></tr>"


def _html_title(panel: PlottedPanel) -> str:
    key_labels = [
        f"{_HTML_LEGEND_MARKS[index % 4]} {html.escape(key)}"
        for index, key in enumerate(panel.keys)
    ]
    keys = "" if panel.keys == [panel.title] else "<br><sub>" + "  ".join(key_labels) + "</sub>"
    return html.escape(panel.title) + keys


def _traces(curve: Curve, color: str, in_legend: bool) -> list[Mapping[str, Any]]:
    """Return arguments of plotly's scatter: for the values, and with smoothing for the means."""
    name = html.escape(curve.run.name)
    shared = {
        "x": curve.x,
        "name": name,
        "legendgroup": name,
        "mode": "lines+markers" if len(curve.x) <= 100 else "lines",
        "marker": {"size": 4},
        "line": {"color": color, "dash": _HTML_DASHES[curve.key_index % 4]},
        "hovertemplate": f"{name}<br>{html.escape(curve.key)}<br>step %{{x}}: "
        f"%{{y:.4g}}<extra></extra>",
    }
    values = {**shared, "y": curve.y, "showlegend": in_legend and curve.smoothed_y is None}
    if curve.smoothed_y is None:
        return [values]
    return [
        {**values, "mode": "lines", "opacity": 0.3},
        {**shared, "y": curve.smoothed_y, "mode": "lines", "showlegend": in_legend},
    ]
