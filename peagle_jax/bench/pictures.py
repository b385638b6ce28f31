"""The report's pictures as SVG: throughput against K, acceptance by position, speed-up.

Drawn for print: every method has its own marker, dash and darkness, so that they stay apart without
colour; white ground, labelled axes, the machine and the data set below each picture.
"""

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

# Colour (of different lightness each, safe for colour-blind readers), marker, dash.
_STYLES = {
    "p-eagle": ("#0b3c6f", "o", "-"),
    "eagle3": ("#c8501e", "s", "--"),
    "prompt-lookup": ("#2a9d78", "^", "-."),
    "none": ("#000000", "", ":"),
    "transformers": ("#8a8a8a", "", (0, (1, 3))),
    "transformers-prompt-lookup": ("#8a8a8a", "v", (0, (5, 2, 1, 2))),
}


def draw(report: Mapping[str, Any]) -> dict[str, str]:
    """Name -> SVG text of every picture that the results have figures for."""
    rows = report["results"]
    below = _caption(report)
    plots: dict[str, Callable[[Any, Sequence[Row]], None]] = {}
    if any(row["k"] is not None and row["output_tokens_per_s"] for row in rows):
        plots["throughput"] = _throughput
    if any(row["acceptance_rate_per_position"] for row in rows):
        plots["acceptance"] = _acceptance
    if len({row["concurrency"] for row in rows if row["speedup_over_plain"]}) > 1:
        plots["speedup"] = _speedup
    return {name: _figure(plot, rows, below) for name, plot in plots.items()}


def _throughput(axes: Any, rows: Sequence[Row]) -> None:
    """Tokens/s against K at the lowest concurrency; what has no K is a level line."""
    rows = _at_lowest_concurrency(rows)
    for method, mine in _by_method(rows).items():
        color, marker, dash = _STYLES[method]
        style = {"color": color, "linestyle": dash, "label": method}
        if mine[0]["k"] is None:
            axes.axhline(mine[0]["output_tokens_per_s"], **style)
        else:
            mine = sorted(mine, key=lambda row: row["k"])
            rates = [row["output_tokens_per_s"] for row in mine]
            axes.plot([row["k"] for row in mine], rates, marker=marker, **style)
    axes.set_xticks(sorted({row["k"] for row in rows if row["k"] is not None}))
    axes.set_xlabel("draft tokens per round (K)")
    axes.set_ylabel("output tokens/s")
    axes.set_ylim(bottom=0)
    axes.set_title(f"Throughput, {rows[0]['concurrency']} in flight")


def _acceptance(axes: Any, rows: Sequence[Row]) -> None:
    """Share of draft rounds whose i-th draft was accepted, at each method's largest K."""
    longest = 1
    for method, mine in _by_method(rows).items():
        row = max(mine, key=lambda row: (row["k"] or 0, -row["concurrency"]))
        rates = row["acceptance_rate_per_position"]
        if not rates:
            continue
        color, marker, dash = _STYLES[method]
        label = f"{method}, K={row['k']}: acceptance length {row['acceptance_length']:.2f}"
        positions = range(1, len(rates) + 1)
        axes.plot(positions, rates, color=color, marker=marker, linestyle=dash, label=label)
        longest = max(longest, len(rates))
    axes.set_xticks(range(1, longest + 1))
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted, share of draft rounds")
    axes.set_ylim(0, 1)
    axes.set_title("Acceptance by position")


def _speedup(axes: Any, rows: Sequence[Row]) -> None:
    """Over plain decoding at the same concurrency, each method at its best K there."""
    levels = sorted({row["concurrency"] for row in rows})
    for method, mine in _by_method(rows).items():
        best = {
            level: max(found)
            for level in levels
            if (
                found := [
                    row["speedup_over_plain"]
                    for row in mine
                    if row["concurrency"] == level and row["speedup_over_plain"]
                ]
            )
        }
        if not best:
            continue
        color, marker, dash = _STYLES[method]
        xs, ys = list(best), list(best.values())
        axes.plot(xs, ys, color=color, marker=marker, linestyle=dash, label=method)
    axes.set_xscale("log", base=2)
    axes.set_xticks(levels, [str(level) for level in levels])
    axes.minorticks_off()
    axes.set_xlabel("requests in flight")
    axes.set_ylabel("speed-up over plain decoding")
    axes.set_ylim(bottom=0)
    axes.set_title("Speed-up, each at its best K")


def _figure(plot: Callable[[Any, Sequence[Row]], None], rows: Sequence[Row], below: str) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    settings = {
        "font.size": 10,
        "svg.fonttype": "path",
        "svg.hashsalt": "peagle",
        "lines.linewidth": 1.8,
        "lines.markersize": 7,
        "axes.grid": True,
        "grid.color": "#dddddd",
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(6.4, 4.4), layout="constrained")
        axes = figure.subplots()
        plot(axes, rows)
        axes.legend(frameon=False, fontsize=9)
        figure.supxlabel(below, fontsize=7.5, color="#333333")
        text = io.StringIO()
        figure.savefig(text, format="svg", facecolor="white", metadata={"Date": None})
    return text.getvalue()


def _caption(report: Mapping[str, Any]) -> str:
    environment, rows = report["environment"], report["results"]
    machine = environment.get("processor") or environment.get("machine")
    devices = environment.get("devices") or [""]
    if environment.get("platform") != "cpu":
        machine = f"{len(devices)} x {devices[0]}"
    cores = environment.get("cores")
    facts = [
        f"{rows[0]['dataset']}, {rows[0]['num_requests']} requests",
        f"{machine}, {cores} core{'s' if cores != 1 else ''}",
        f"peagle-jax {environment.get('revision') or environment.get('peagle-jax')}",
    ]
    return textwrap.fill("; ".join(facts), 95)


def _by_method(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["method"], []).append(row)
    return {method: found[method] for method in _STYLES if method in found}


def _at_lowest_concurrency(rows: Sequence[Row]) -> list[Row]:
    lowest = min(row["concurrency"] for row in rows)
    return [row for row in rows if row["concurrency"] == lowest]
