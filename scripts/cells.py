"""Print what streams and images need with PostgreSQL, from the published measurements: `python scripts/cells.py`.

The tables are part of docs/explanation/scale.md. They hold no prices: amounts of cores and bytes, for you to multiply.
"""

import json
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parent.parent / "docs" / "results"
SECONDS_PER_DAY = 86_400
# What a cell is: cores of its database, the part of them that may be busy, and its streams.
DATABASE_CORES, BUSY, STREAMS = 8, 0.5, 1_000_000
# The database is stored on the primary and two standbys; the decision log is kept so many days.
COPIES, LOG_DAYS = 3, 30
CELLS = (1, 10, 100)
IMAGES = 10**9


def measured():
    """Return the medians of one observe, and the bytes of a stream."""
    rounds = json.loads((RESULTS / "shared-streams.json").read_text())["rounds"]
    names = rounds[0]["several, by hash"]
    found = {name: float(np.median([each["several, by hash"][name] for each in rounds])) for name in names}
    (row,) = json.loads((RESULTS / "million_streams.json").read_text())["rows"]
    return found | {name: row[name] for name in ("bytes_per_stream", "record_bytes", "log_bytes")}


def table(head, rows):
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def bytes_in_words(size):
    """Return a size with three digits."""
    for unit, factor in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:,.0f} bytes"


def cells(found):
    """Return the table of cells."""
    rate = BUSY * DATABASE_CORES / (found["database_ms"] / 1000)
    rows = []
    for count in CELLS:
        images = count * rate
        log = LOG_DAYS * SECONDS_PER_DAY * images * found["log_bytes"]
        rows.append(
            [
                count,
                f"{count * STREAMS:,}",
                f"{images:,.0f}",
                f"{SECONDS_PER_DAY * images / 1e9:.2g} billion",
                f"{images * (found['service_ms'] + found['haproxy_ms']) / 1000:,.0f}",
                f"{count * DATABASE_CORES}",
                f"{bytes_in_words(images * found['wal_bytes'])}/s",
                bytes_in_words(COPIES * count * STREAMS * found["bytes_per_stream"]),
                bytes_in_words(COPIES * log),
            ]
        )
    head = ["cells", "streams", "images per second", "images per day", "busy cores of processes and HAProxy"]
    return table(
        head + ["cores of databases", "write-ahead log", "disk for new streams", "disk for decision logs"], rows
    )


def costs(found):
    """Return the table of amounts behind the formulas."""
    rate = IMAGES / SECONDS_PER_DAY
    cores = {name: rate * found[f"{name}_ms"] / 1000 for name in ("service", "database", "haproxy")}
    streams = COPIES * 10**6 * found["bytes_per_stream"]
    rows = [
        [
            "a million new streams",
            f"10^6 x {found['bytes_per_stream']:,.0f} bytes x {COPIES} copies",
            bytes_in_words(streams),
        ],
        [
            "a billion images a day, processes",
            f"{rate:,.0f}/s x {found['service_ms']:.2f} ms",
            f"{cores['service']:.1f} busy cores",
        ],
        [
            "the same, databases",
            f"{rate:,.0f}/s x {found['database_ms']:.2f} ms",
            f"{cores['database']:.1f} busy cores",
        ],
        ["the same, HAProxy", f"{rate:,.0f}/s x {found['haproxy_ms']:.2f} ms", f"{cores['haproxy']:.1f} busy cores"],
        [
            "the same, write-ahead log",
            f"10^9 x {found['wal_bytes']:,.0f} bytes",
            f"{bytes_in_words(IMAGES * found['wal_bytes'])} per day",
        ],
        [
            f"the same, decision logs of {LOG_DAYS} days",
            f"{LOG_DAYS} x 10^9 x {found['log_bytes']:,.0f} bytes x {COPIES} copies",
            bytes_in_words(LOG_DAYS * IMAGES * COPIES * found["log_bytes"]),
        ],
    ]
    return table(["what", "calculation", "amount"], rows)


if __name__ == "__main__":
    found = measured()
    print(costs(found), cells(found), sep="\n\n")
