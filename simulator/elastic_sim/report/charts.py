"""Charts of the pages, as Plotly figures in HTML. The only module that needs plotly.

Callers pass plain text and each function escapes it, because Plotly interprets tags in labels.
`templates/style.css` gives the colours of text and grid lines for light and dark pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from textwrap import wrap
from typing import Any

from elastic.domain.errors import needs_extra
from elastic.planning.capacity.svg import COLOURS, NAMES, Panel, seconds
from elastic_sim.replay.replay import ORACLE, Mean
from elastic_sim.report.durations import axis_unit, clock, duration
from elastic_sim.steps.policies import policy_class
from elastic_sim.steps.time_accounting import Use
from elastic_sim.traces.statistics import node_counts
from elastic_sim.traces.trace import ADD, Trace

with needs_extra("simulator", "An HTML page"):
    from plotly import graph_objects as go
    from plotly.offline import get_plotlyjs
    from plotly.subplots import make_subplots

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b3a100")
"""Colours of policies: Okabe and Ito's palette for colour-blind readers, with a darker yellow."""
GREY = "#8c8c8c"
"""Colour of the upper bounds."""
LOSS = "#d55e00"
USES = {
    Use.USEFUL: "#009e73",
    Use.DETECT: "#f0e442",
    Use.PLAN: "#e69f00",
    Use.TRANSFER: "#56b4e9",
    Use.LOST: "#d55e00",
    Use.REDUNDANT: "#cc79a7",
    Use.IDLE: "#b0b0b0",
}
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "triangle-down", "cross")
DASHES = ("solid", "dash", "dot")
MAX_LABEL = 44
"""Characters of the longest label on an axis."""
BAR, UNIT, GAP, TOP, BOTTOM = 30, 26, 34, 34, 44
"""Heights in pixels: bar, row of a pipeline, gap between charts, top and bottom margin."""
LETTER, NARROW = 6, 400
"""Widths in pixels: a typical letter, a narrow chart."""
TEMPLATE = go.layout.Template(
    layout={
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, Segoe UI, Roboto, Helvetica, Arial, sans-serif", "size": 12},
        "margin": {"l": 60, "r": 16, "t": TOP, "b": BOTTOM},
        "xaxis": {
            "automargin": True,
            "gridcolor": "#dfe3e9",
            "zeroline": False,
            "title_standoff": 8,
        },
        "yaxis": {"automargin": True, "gridcolor": "#dfe3e9", "zeroline": False},
        "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
    }
)
CONFIG = {"responsive": True, "displayModeBar": False}


def library() -> str:
    """Return the source of plotly.js, which a page needs once."""
    return str(get_plotlyjs())


def html(figure: Any, name: str) -> str:
    """Return the markup of a figure; `name` is unique on its page."""
    return str(figure.to_html(CONFIG, include_plotlyjs=False, full_html=False, div_id=name))


def colour(policy: str, index: int) -> str:
    """Return the colour of the `index`-th policy of a page."""
    return GREY if policy_class(policy).about.bound else PALETTE[index % len(PALETTE)]


def goodput_bars(goodputs: Mapping[str, Mean]) -> Any:
    """Return bars of the goodput of each policy with its 95 % interval."""
    percents = [goodput.percent for goodput in goodputs.values()]
    bar = go.Bar(
        orientation="h",
        x=[percent.value for percent in percents],
        y=_labels(goodputs),
        error_x=_error(percents),
        marker_color=[colour(policy, i) for i, policy in enumerate(goodputs)],
        hovertemplate="%{y}: %{x:.1f} %<extra></extra>",
    )
    figure = _policy_bars([bar], len(goodputs), "goodput (% of the oracle)")
    return figure.update_xaxes(rangemode="nonnegative")


def time_bars(shares: Mapping[str, Mapping[str, float]]) -> Any:
    """Return one stacked bar of node time per policy. `shares`: fractions by policy and use."""
    bars = [
        go.Bar(
            orientation="h",
            name=use.value,
            x=[100 * share[use] for share in shares.values()],
            y=_labels(shares),
            text=[f"{100 * share[use]:.1f} %" for share in shares.values()],
            textposition="inside",
            textangle=0,
            textfont_color="black",
            marker_color=USES[use],
            hovertemplate=f"%{{y}}: {use.value} %{{x:.2f}} %<extra></extra>",
        )
        for use in Use
    ]
    figure = _policy_bars(bars, len(shares), "share of node time (%)")
    return figure.update_layout(barmode="stack", xaxis_range=[0, 100])


def _policy_bars(bars: Sequence[Any], n: int, title: str) -> Any:
    figure = _figure(bars, BAR * n, title, "", TOP if len(bars) > 1 else 10)
    figure.update_yaxes(autorange="reversed", showgrid=False, dtick=1)
    return figure.update_layout(
        uniformtext={"minsize": 10, "mode": "hide"}, legend_traceorder="normal"
    )


def over_time(
    trace: Trace,
    window_s: float,
    rates: Mapping[str, Sequence[float]],
    changes: Mapping[str, Sequence[tuple[float, str]]],
) -> Any:
    """Return charts of nodes and of each policy's throughput on one time axis.

    `rates`: samples per second, per window; the oracle's are drawn grey behind the others.
    `changes`: (seconds, reason) of each change of plan.
    """
    unit, name = axis_unit(trace.end_s)
    titles = ["<b>nodes</b>", *(f"<b>{_label(policy)}</b>, samples/s" for policy in rates)]
    figure = _stacked([84, *(62 for _ in rates)], titles)
    nodes = node_counts(trace)
    tallest = max((n for _, n in nodes), default=0) or 1
    lost: dict[float, list[str]] = {}
    for event in trace.events:
        if event.kind != ADD:
            lost.setdefault(event.seconds, []).append(event.node)
    losses = [(at, f"{' '.join(names)} lost") for at, names in lost.items()]
    figure.add_trace(_area(nodes, unit, GREY, "%{y} nodes"), row=1, col=1)
    figure.add_trace(_marks(losses, unit, 1.15 * tallest, "triangle-down", LOSS), row=1, col=1)
    figure.update_yaxes(range=[0, 1.25 * tallest], row=1, col=1)
    points = {
        policy: [*((i * window_s, rate) for i, rate in enumerate(row)), (trace.end_s, row[-1])]
        for policy, row in rates.items()
    }
    most = max((rate for row in rates.values() for rate in row), default=0.0) or 1.0
    for i, (policy, steps) in enumerate(points.items()):
        place = {"row": i + 2, "col": 1}
        if ORACLE in points and policy != ORACLE:
            figure.add_trace(_area(points[ORACLE], unit, GREY, "", width=0), **place)
        line, hover = colour(policy, i), f"{_label(policy)}: %{{y:.4g}} samples/s"
        figure.add_trace(_area(steps, unit, line, hover), **place)
        marks = _marks(changes[policy], unit, -0.12 * most, "line-ns", line)
        figure.add_trace(marks, **place)
        figure.update_yaxes(range=[-0.25 * most, 1.05 * most], nticks=4, **place)
    figure.update_xaxes(range=[0, trace.end_s / unit])
    figure.update_xaxes(title=f"time ({name})", row=len(rates) + 1, col=1)
    return figure.update_layout(showlegend=False)


def _marks(
    marks: Sequence[tuple[float, str]], unit: float, y: float, symbol: str, colour: str
) -> Any:
    return go.Scatter(
        mode="markers",
        x=[at / unit for at, _ in marks],
        y=[y for _ in marks],
        text=["<br>".join(map(_text, wrap(f"{clock(at)}: {text}", 90))) for at, text in marks],
        hovertemplate="%{text}<extra></extra>",
        marker={
            "symbol": symbol,
            "size": 8,
            "color": colour,
            "line": {"color": colour, "width": 1.5},
        },
        cliponaxis=False,
    )


def pipelines(panels: Sequence[Panel]) -> Any:
    """Return timelines of pipelines: one row per unit, one box per compute action."""
    figure = _stacked(
        [UNIT * len(panel.rows) for panel in panels], [_text(panel.title) for panel in panels]
    )
    shown = set[str]()
    for i, panel in enumerate(panels, 1):
        spans = [(span, panel.timeline.unit_of(span)) for span in panel.timeline.spans]
        for kind in NAMES:
            mine = [(span, row) for span, row in spans if span.action.kind.value == kind]
            if not mine:
                continue
            bar = go.Bar(
                orientation="h",
                name=NAMES[kind],
                legendgroup=kind,
                showlegend=kind not in shown,
                base=[span.start_s for span, _ in mine],
                x=[span.end_s - span.start_s for span, _ in mine],
                y=[row for _, row in mine],
                width=0.86,
                text=[f"{span.action.microbatch}" for span, _ in mine],
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                textfont_color="black",
                hovertext=[
                    f"{span.action} on {_text(panel.rows[row])}: "
                    f"{seconds(span.start_s)} to {seconds(span.end_s)}"
                    for span, row in mine
                ],
                hoverinfo="text",
                marker_color=COLOURS[kind],
            )
            figure.add_trace(bar, row=i, col=1)
            shown.add(kind)
        n = len(panel.rows)
        figure.update_yaxes(tickvals=list(range(n)), ticktext=_labels(panel.rows), row=i, col=1)
        figure.update_yaxes(range=[n - 0.5, -0.5], showgrid=False, row=i, col=1)
    figure.update_xaxes(title="time (s)", row=len(panels), col=1)
    figure.update_layout(barmode="overlay", uniformtext={"minsize": 8, "mode": "hide"})
    inner, height = figure.layout.height - TOP - BOTTOM, figure.layout.height + GAP
    return figure.update_layout(legend_y=1 + GAP / inner, margin_t=TOP + GAP, height=height)


def failure_rates(rates_s: Sequence[float], goodputs: Mapping[str, Sequence[Mean]]) -> Any:
    """Return a curve of goodput per policy, over the mean seconds between losses."""
    curves = {name: [one.percent for one in found] for name, found in goodputs.items()}
    durations = [duration(rate) for rate in rates_s]
    drawn = [
        go.Scatter(
            name=_label(policy),
            mode="lines+markers",
            x=rates_s,
            y=[percent.value for percent in curve],
            error_y=_error(curve),
            line={
                "color": colour(policy, i),
                "dash": DASHES[i // len(PALETTE) % len(DASHES)],
                "width": 2 if i else 3,
            },
            marker={"symbol": SYMBOLS[i % len(SYMBOLS)], "size": 8},
            hovertemplate="%{fullData.name}, a loss every %{text}: %{y:.1f} %<extra></extra>",
            text=durations,
        )
        for i, (policy, curve) in enumerate(curves.items())
    ]
    figure = _figure(drawn, 300, "mean time between losses", "goodput (% of the oracle)")
    ticks = {"tickvals": rates_s, "ticktext": durations}
    figure.update_xaxes(type="log", showgrid=False, minor_ticks="", **ticks)
    most = max([100.0, *(percent.value for curve in curves.values() for percent in curve)])
    figure.update_yaxes(range=[0, 1.05 * most])
    entry = 40 + LETTER * max(map(len, curves))
    lines = -(-len(curves) // max(1, NARROW // entry))
    figure.update_layout(showlegend=True, legend_maxheight=20 * lines + TOP)
    return figure.update_layout(
        margin_t=20 * lines + 14, height=figure.layout.height + 20 * (lines - 1)
    )


def heat(rows: Sequence[str], columns: Sequence[str], goodputs: Sequence[Sequence[Mean]]) -> Any:
    """Return a heat map of goodput in percent, the best of each row in bold."""
    values, texts = [], []
    for row in goodputs:
        percents = [goodput.percent for goodput in row]
        best = max(percent.value for percent in percents)
        bold = [percent.value == best > 0 for percent in percents]
        values.append([percent.value for percent in percents])
        texts.append(
            [f"<b>{p:.1f}</b>" if b else f"{p:.1f}" for p, b in zip(percents, bold, strict=True)]
        )
    cells = go.Heatmap(
        z=values,
        text=texts,
        texttemplate="%{text}",
        textfont_color="black",
        colorscale=[[0.0, "#ffffff"], [0.5, "#dceefa"], [1.0, "#56b4e9"]],
        zmin=0,
        zmax=100,
        xgap=2,
        ygap=2,
        showscale=False,
        hovertemplate="%{text} %<extra></extra>",
    )
    figure = _figure([cells], BAR * max(len(rows), 4), "", "")
    broken = [label.replace("+", "<br>+") for label in _labels(columns)]
    names = {"tickvals": list(range(len(columns))), "ticktext": broken}
    figure.update_xaxes(side="top", showgrid=False, tickangle=0, **names)
    names = {"tickvals": list(range(len(rows))), "ticktext": _labels(rows)}
    figure.update_yaxes(autorange="reversed", showgrid=False, **names)
    return figure.update_layout(
        margin={"t": TOP + 10, "b": 10}, height=figure.layout.height - BOTTOM + 20
    )


def steps(points: Sequence[tuple[float, float]], end_s: float, across: str, up: str) -> Any:
    """Return a step curve of (seconds, value from then on). `across` and `up`: axis titles."""
    unit, name = axis_unit(end_s)
    figure = _figure(
        [_area(points, unit, PALETTE[0], "%{y:.4g}")], 220, f"{across} ({name})", up, 10
    )
    figure.update_xaxes(range=[0, end_s / unit])
    return figure.update_yaxes(rangemode="tozero")


def histogram(counts: dict[int, int], across: str, up: str) -> Any:
    """Return a histogram of whole numbers."""
    bar = go.Bar(
        x=list(counts),
        y=list(counts.values()),
        marker_color=PALETTE[0],
        hovertemplate="%{x}: %{y}<extra></extra>",
    )
    figure = _figure([bar], 220, across, up, 10)
    figure.update_xaxes(dtick=max(1, -(-len(counts) // 12)), showgrid=False)
    return figure.update_yaxes(
        rangemode="tozero", dtick=1 if max(counts.values(), default=0) < 6 else None
    )


def _figure(traces: Sequence[Any], inner: int, across: str, up: str, top: int = TOP) -> Any:
    """Return one chart, `inner` pixels high without its margins. `across` and `up`: axis titles."""
    figure = go.Figure(list(traces), {"template": TEMPLATE, "height": inner + top + BOTTOM})
    return figure.update_layout(xaxis_title=across, yaxis_title=up, margin_t=top)


def _error(means: Sequence[Mean]) -> dict[str, Any]:
    """Return error bars that do not reach below 0."""
    return {
        "array": [one.margin for one in means],
        "arrayminus": [min(one.value, one.margin) for one in means],
        "symmetric": False,
        "visible": any(one.margin for one in means),
        "thickness": 1.2,
    }


def _stacked(heights: Sequence[float], titles: Sequence[str]) -> Any:
    """Return charts below each other, of these heights in pixels, each with its title above."""
    whole = sum(heights) + GAP * (len(heights) - 1)
    figure = make_subplots(
        rows=len(heights),
        shared_xaxes=True,
        row_heights=list(heights),
        vertical_spacing=GAP / whole if len(heights) > 1 else 0,
        subplot_titles=list(titles),
    )
    figure.update_annotations(x=0, xanchor="left", font_size=13)
    return figure.update_layout(template=TEMPLATE, height=TOP + BOTTOM + whole)


def _area(
    points: Sequence[tuple[float, float]], unit: float, line: str, hover: str, width: float = 1.6
) -> Any:
    """Return a filled step curve. `hover`: hover text after the time; "": none."""
    return go.Scatter(
        mode="lines",
        x=[at / unit for at, _ in points],
        y=[value for _, value in points],
        text=[clock(at) for at, _ in points],
        line={"shape": "hv", "color": line, "width": width},
        fill="tozeroy",
        fillcolor=f"rgba({', '.join(str(int(line[i : i + 2], 16)) for i in (1, 3, 5))}, 0.25)",
        hovertemplate=f"%{{text}}: {hover}<extra></extra>" if hover else None,
        hoverinfo=None if hover else "skip",
    )


def _labels(texts: Iterable[str]) -> list[str]:
    return [_label(text) for text in texts]


def _label(text: str) -> str:
    return _text(text if len(text) <= MAX_LABEL else f"{text[: MAX_LABEL - 1]}…")


def _text(text: str) -> str:
    """Escape text for Plotly, which interprets tags."""
    return escape(text, quote=False)
