"""Run the measurements: `python -m benchmarks [NAME ...]`, all of them without a name.

Each is a module of this folder with `NAME`, `measure(quick)` and `as_markdown(rows)`. `--write` keeps the tables in
docs/results and adds a line to history.jsonl, so that a regression shows; `--compare` prints what moved since the last
line of the same machine type.
"""

import argparse
import importlib
import json
import time

from benchmarks.timing import RESULTS, ROOT, machine

MODULES = ("step", "classes", "pipeline", "streams", "guards", "discovery")
# These run only by their names.
NAMED = ("million_streams", "scene")
HISTORY = ROOT / "benchmarks" / "history.jsonl"
TITLES = {
    "step": "What one step costs",
    "classes": "How the cost grows with the number of classes",
    "pipeline": "From images to decisions",
    "streams": "Many streams on one machine",
    "guards": "Guards on streams that poison, and on honest ones",
    "discovery": "Clusters of unknown images",
    "scene": "Warnings about cameras",
    "million_streams": "A million streams in PostgreSQL",
}
# A ratio that lies by more than this factor beyond that of the last run is shown as moved.
TOLERANCE = 1.25


def ratios(name, rows):
    """The ratios of some rows by what they are of, for the history."""
    about = ("classes", "method", "encoder", "images", "threads", "stage", "part", "streams", "exponent")
    found = {}
    for row in rows:
        if "ratio" in row:
            found[" ".join([name, *(str(row[key]) for key in about if key in row)])] = row["ratio"]
    return found


def moved(now, before):
    """Lines on the ratios that are larger or smaller than they were."""
    for name, value in now.items():
        old = before.get(name)
        if old and not 1 / TOLERANCE < value / old < TOLERANCE:
            yield f"{name}: {old:.2f} -> {value:.2f}"


def page(name, rows, about):
    """The page of one measurement."""
    versions = ", ".join(f"{package} {number}" for package, number in about["versions"].items())
    made = f"`python -m benchmarks {name}`, {about['cores']} cores of {about['machine']}, {versions}."
    return f"# {TITLES[name]}\n\n{made}\n\n{importlib.import_module(f'benchmarks.{name}').as_markdown(rows)}"


def keep(name, rows, about):
    """Write the page, the rows and the plot of one measurement."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.md").write_text(page(name, rows, about))
    (RESULTS / f"{name}.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    plot = getattr(importlib.import_module(f"benchmarks.{name}"), "plot", None)
    if plot is not None:
        plot(rows, RESULTS / f"{name}.png")


def last(about):
    """The newest ratios of the history from the same type of machine."""
    lines = HISTORY.read_text().splitlines() if HISTORY.is_file() else []
    found = {}
    for line in map(json.loads, lines):
        if line["machine"] == about["machine"]:
            found |= line["ratios"]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", choices=[*MODULES, *NAMED, []], help=f"which; without a name, {', '.join(MODULES)}"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", action="store_true", help="keep the tables in docs/results, and a line of history")
    parser.add_argument("--draw", action="store_true", help="measure nothing: draw the chart of the stored rows")
    arguments = parser.parse_args()
    if arguments.draw:
        for name in arguments.names:
            rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
            importlib.import_module(f"benchmarks.{name}").plot(rows, RESULTS / f"{name}.png")
        return
    about, results = machine(), {}
    for name in arguments.names or MODULES:
        results[name] = importlib.import_module(f"benchmarks.{name}").measure(arguments.quick)
        if not arguments.json:
            print(page(name, results[name], about), flush=True)
        if arguments.write:
            keep(name, results[name], about)
    now = {key: value for name, rows in results.items() for key, value in ratios(name, rows).items()}
    if arguments.json:
        print(json.dumps({**about, "results": results}))
    else:
        print("\n".join(["Moved since the last run:", *moved(now, last(about))]))
    if arguments.write and now:
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **about, "ratios": now}
        with HISTORY.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
