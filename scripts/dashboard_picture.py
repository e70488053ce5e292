"""Draws the panels of deploy/grafana/protodcs.json from what a Prometheus answers, where no Grafana is at hand.

python scripts/dashboard_picture.py http://127.0.0.1:9090 dashboard.png --minutes 5
"""

import argparse
import json
import re
import time
import urllib.parse
import urllib.request
from pathlib import Path

try:
    import matplotlib
except ModuleNotFoundError:
    raise SystemExit("this needs matplotlib: pip install matplotlib") from None

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BOARD = Path(__file__).parent.parent / "deploy" / "grafana" / "protodcs.json"
# What Grafana puts in place of $__rate_interval: four scrapes.
RATE = "20s"
# Units in the words of Grafana, and in ours.
UNITS = {"short": "", "percentunit": " [share]", "reqps": " [per second]", "ops": " [per second]", "s": " [seconds]"}
# Of a legend, so that three fit beside each other.
LONGEST = 34


def panels():
    """The panels that ask something, and the rows above them."""
    return json.loads(BOARD.read_text())["panels"]


def asked(expression):
    """What Grafana would ask for an expression of a panel."""
    return expression.replace("$__rate_interval", RATE)


def answers(prometheus, expression, start, end, step):
    """The series of an expression: [(labels, times, values)]."""
    query = urllib.parse.urlencode({"query": asked(expression), "start": start, "end": end, "step": step})
    with urllib.request.urlopen(f"{prometheus}/api/v1/query_range?{query}", timeout=30) as answer:
        found = json.load(answer)["data"]["result"]
    return [
        (series["metric"], [float(at) for at, _ in series["values"]], [float(value) for _, value in series["values"]])
        for series in found
    ]


def legend(pattern, labels):
    """A legend as Grafana makes it: {{name}} stands for a label."""
    words = re.sub(r"{{\s*(\w+)\s*}}", lambda name: labels.get(name[1], ""), pattern) or "value"
    return words.replace("/v1/streams/{stream}", "...")[:LONGEST]


def with_gaps(times, values, step):
    """The same line, broken where nothing was answered for more than two steps."""
    broken = []
    for at, value in zip(times, values, strict=True):
        if broken and at - broken[-1][0] > 2.5 * step:
            broken.append((at, float("nan")))
        broken.append((at, value))
    return zip(*broken, strict=True)


def draw(prometheus, file, minutes):
    """All panels where the dashboard has them; gives the titles of those without an answer."""
    end = time.time()
    start, step = end - 60 * minutes, max(1.0, minutes * 60 / 200)
    board = panels()
    bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board)
    figure = plt.figure(figsize=(18, 0.36 * bottom), layout="none")
    empty = []
    for panel in board:
        place = panel["gridPos"]
        top, left = 1 - place["y"] / bottom, place["x"] / 24
        if panel["type"] == "row":
            figure.text(0.004, top - 0.6 / bottom, panel["title"], fontsize=12, fontweight="bold", va="center")
            continue
        box = (left + 0.03, top - (place["h"] - 0.9) / bottom, place["w"] / 24 - 0.045, (place["h"] - 2.1) / bottom)
        axes = figure.add_axes(box)
        unit = panel["fieldConfig"]["defaults"]["unit"]
        axes.set_title(panel["title"] + UNITS.get(unit, f" [{unit}]"), fontsize=8, loc="left")
        axes.tick_params(labelsize=6)
        drawn = 0
        for target in panel["targets"]:
            for labels, times, values in answers(prometheus, target["expr"], start, end, step):
                drawn += 1
                if panel["type"] == "stat":
                    axes.axis("off")
                    axes.text(0.5, 0.45, f"{values[-1]:.3g}", fontsize=22, ha="center", va="center")
                else:
                    moments, seen = with_gaps(times, values, step)
                    at = [(moment - end) / 60 for moment in moments]
                    axes.plot(at, seen, linewidth=1, label=legend(target["legendFormat"], labels))
        if drawn and panel["type"] != "stat":
            axes.set_xlim(-minutes, 0)
            axes.set_xlabel("minutes", fontsize=6, labelpad=0)
            # Room for the legend above the lines, and for lines at zero.
            highest = axes.get_ylim()[1]
            axes.set_ylim(-0.02 * highest, 1.5 * highest)
            axes.legend(fontsize=6, loc="upper left", ncols=3, frameon=False)
        elif not drawn:
            empty.append(panel["title"])
            axes.text(0.5, 0.5, "no data", ha="center", color="grey", transform=axes.transAxes)
    figure.savefig(file, dpi=80)
    plt.close(figure)
    return empty


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prometheus")
    parser.add_argument("file", type=Path)
    parser.add_argument("--minutes", type=float, default=5.0)
    given = parser.parse_args()
    for title in draw(given.prometheus, given.file, given.minutes):
        print(f"no data: {title}")
