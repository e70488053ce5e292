"""The service under more than it can serve: the flood of one tenant, its most expensive settings, and too much of all.

What a polite caller meets is measured by a small probe at a steady rate, in turns with and without the load, which
comes from a process of its own at the lowest priority. Probe and load are open loops: they do not wait for answers.
"""

import json
import os
import time
from collections import Counter

import numpy as np

from benchmarks.load import Sender
from benchmarks.timing import clip_stream, table

# The probe: requests a second, connections, seconds of a run.
PROBE, PROBE_CONNECTIONS, SECONDS = 40.0, 16, 30.0
TENANTS = ("calm", "flood")
# The flood of one tenant, and the load of all: requests a second, connections.
FLOOD, FLOOD_CONNECTIONS = 2000.0, 200
LOAD, LOAD_CONNECTIONS = 400.0, 100
# The tenant with the most expensive streams: requests a second, features of each, connections. The service can serve so
# many requests: what more of them do is the flood.
EXPENSIVE, FEATURES_TOGETHER, EXPENSIVE_CONNECTIONS = 10.0, 10, 16
# Most of what the probe sends then is refused: it sends more, so that enough is served to tell a p99.
BUSY_PROBE, BUSY_CONNECTIONS = 100.0, 64
# So long it runs before anything is measured.
BEFORE = 3.0


def p99(told):
    """Of the requests that were served, in milliseconds."""
    return 1000 * float(np.quantile([seconds for _, status, seconds in told if status == 200], 0.99))


def p50(told):
    return 1000 * float(np.median([seconds for _, status, seconds in told if status == 200]))


def statuses(told):
    """How many requests had which outcome."""
    return dict(Counter(str(status) for _, status, _ in told))


def most_expensive(config, prototypes):
    """Return the most expensive stream that a service accepts: (prototypes, options).

    Each sample enters the cache, and each change of the cache compares all classes that have cached samples. Of the
    settings that were tried these take the longest: about 7 ms a step once each class has samples, a third of the
    estimate that the limits are compared with.
    """
    from protodcs import ProtoDCSConfig
    from protodcs.errors import ConfigError
    from protodcs.serve.settings import cost_limits_of
    from protodcs.serve.stream.cost import check_cost

    options = {"alignment_direction": "text-to-visual", "cache_quantile": 1.0, "trust_quantile": 1.0}
    resolved, limits = ProtoDCSConfig(**options), cost_limits_of(config, "flood/s")
    classes, dimension = 2, prototypes.shape[1]
    try:
        while True:
            check_cost(resolved, classes + 1, dimension, config.guard, limits)
            classes += 1
    except ConfigError:
        pass
    noise = np.random.default_rng(0).normal(scale=0.02, size=(classes, dimension))
    return np.resize(prototypes, (classes, dimension)) + noise, {"method": "protodcs", "config": options}


def senders_of(rig, streams=8, expensive=False):
    """New streams of tenants: {tenant: Sender of observes on them}; those of the tenant `flood` may be expensive."""
    prototypes, features = clip_stream("dtd")
    senders = {}
    for name in TENANTS:
        if expensive and name == "flood":
            costly, options = most_expensive(rig.config, prototypes)
            # Samples of all classes, so that each class has some.
            senders[name] = _sender(rig, name, streams, costly, np.tile(costly, (3, 1)), FEATURES_TOGETHER, options)
        else:
            senders[name] = _sender(rig, name, streams, prototypes, features[:500], 1, {})
    return senders


def _sender(rig, name, streams, prototypes, features, together, options):
    """Create streams of a tenant and return a Sender of observes; with several features each, streams see all first."""
    import httpx

    rows = features.astype("<f4")
    bodies = [rows[start : start + together].tobytes() for start in range(0, len(rows) - together + 1, together)]
    paths = [f"/v1/streams/{name}-{number}/observe?count={together}" for number in range(streams)]
    who = {"authorization": f"Bearer {rig.tenant_keys[name]}"}
    with httpx.Client(base_url=rig.service.address, headers=who, timeout=60) as client:
        first = f"{name}-0"
        made = client.post("/v1/streams", json={"id": first, "prototypes": prototypes.tolist(), **options})
        assert made.status_code == 201, made.text
        for number in range(1, streams):
            made = client.post("/v1/streams", json={"id": f"{name}-{number}", "like": first})
            assert made.status_code == 201, made.text
        if together > 1:
            for path in paths:
                for body in bodies:
                    seen = client.post(path, content=body, headers={"content-type": "application/octet-stream"})
                    assert seen.status_code == 200, seen.text
    headers = [f"authorization: Bearer {rig.tenant_keys[name]}\r\n"] * streams
    return Sender(rig.config.host, rig.config.port, paths, bodies, headers)


def flood(rig, quick, rounds=5, seconds=SECONDS):
    """A row: what the flood of one tenant does to another one."""
    yield from _beside(rig, quick, "flood", FLOOD, FLOOD_CONNECTIONS, rounds, seconds)


def expensive(rig, quick, rounds=5, seconds=SECONDS):
    """A row: what one tenant with the most expensive streams that are allowed does to another one."""
    yield from _beside(rig, quick, "expensive", EXPENSIVE, EXPENSIVE_CONNECTIONS, rounds, seconds)


def _beside(rig, quick, task, rate, connections, rounds, seconds):
    """A row: the latency of one tenant, in turns without and with the load of another one."""
    if quick:
        rounds, seconds = 1, 5.0
    senders = senders_of(rig, expensive=task == "expensive")

    def probe():
        return senders["calm"].send(PROBE, PROBE_CONNECTIONS, seconds)

    probe()
    turns = []
    for _ in range(rounds):
        load = os.getloadavg()[0]
        quiet = probe()
        with senders["flood"].beside(rate, connections, BEFORE + seconds) as outcome:
            time.sleep(BEFORE)
            flooded = probe()
            sent = outcome()
        turns.append(
            {
                "load": load,
                "quiet": {"p50": p50(quiet), "p99": p99(quiet), **statuses(quiet)},
                "flooded": {"p50": p50(flooded), "p99": p99(flooded), **statuses(flooded)},
                "flood": statuses(sent),
                "refused_after": max((took for _, status, took in sent if status == 429), default=0.0),
            }
        )
        print(json.dumps(turns[-1]), flush=True)
        time.sleep(2)
    yield {
        "task": task,
        "ratio": float(np.median([turn["flooded"]["p99"] / turn["quiet"]["p99"] for turn in turns])),
        "offered": rate,
        "connections": connections,
        "rounds": turns,
    }


def overload(rig, quick, rounds=5, seconds=SECONDS):
    """A row: what too much of all tenants does to those who are served, and how soon it is over."""
    if quick:
        rounds, seconds = 1, 5.0
    senders = senders_of(rig)
    both = Sender(
        rig.config.host,
        rig.config.port,
        [path for pair in zip(*(senders[name]._paths for name in senders), strict=True) for path in pair],
        senders["calm"]._bodies,
        [line for pair in zip(*(senders[name]._headers for name in senders), strict=True) for line in pair],
    )
    senders["calm"].send(PROBE, PROBE_CONNECTIONS, seconds)
    turns = []
    for _ in range(rounds):
        load = os.getloadavg()[0]
        quiet = senders["calm"].send(PROBE, PROBE_CONNECTIONS, seconds)
        with both.beside(LOAD, LOAD_CONNECTIONS, BEFORE + seconds) as outcome:
            time.sleep(BEFORE)
            busy = senders["calm"].send(BUSY_PROBE, BUSY_CONNECTIONS, seconds - 1)
            sent = outcome()
        after = senders["calm"].send(PROBE, PROBE_CONNECTIONS, 8.0)
        refused = [took for told in (busy, sent) for _, status, took in told if status == 429]
        turns.append(
            {
                "load": load,
                "quiet": {"p50": p50(quiet), "p99": p99(quiet), **statuses(quiet)},
                "busy": {"p50": p50(busy), "p99": p99(busy), **statuses(busy)},
                "sent": {"p50": p50(sent), "p99": p99(sent), **statuses(sent)},
                "refused_after": max(refused, default=0.0),
                "refused_p50": 1000 * float(np.median(refused)) if refused else 0.0,
                "recovered": recovery(after, p50(quiet)),
                "served_per_second": sum(status == 200 for _, status, _ in sent) / (BEFORE + seconds)
                + sum(status == 200 for _, status, _ in busy) / (seconds - 1),
            }
        )
        print(json.dumps(turns[-1]), flush=True)
        time.sleep(2)
    yield {
        "task": "overload",
        "ratio": float(np.median([turn["busy"]["p99"] / turn["quiet"]["p99"] for turn in turns])),
        "offered": LOAD + BUSY_PROBE,
        "connections": LOAD_CONNECTIONS,
        "rounds": turns,
    }


def recovery(told, usual, window=0.5):
    """Seconds until half a second passes whose requests are all served, by the median within 1.5 of the usual."""
    for begin in np.arange(0.0, told[-1][0], window):
        part = [(status, 1000 * took) for due, status, took in told if begin <= due < begin + window]
        if all(status == 200 for status, _ in part) and np.median([took for _, took in part]) < 1.5 * usual:
            return float(begin)
    return float("inf")


SETTINGS = {
    "expensive": {},
    "flood": {"tenants": {"flood": {"rate": 20, "burst": 20}}},
    "overload": {"slowdown": 1.25},
}


def lines_of(row):
    """A row as lines of the page; none where it is of another part."""
    if row["task"] in ("flood", "expensive"):
        return _flood_lines(row)
    return _overload_lines(row) if row["task"] == "overload" else []


_SHARED = "The load average is that before the round, and tells of other work on the machine:"


def _flood_lines(row):
    allowed = "and may make 20"
    if row["task"] == "expensive":
        allowed = f"of {FEATURES_TOGETHER} features to eight streams with the most expensive settings that are allowed"
    said = (
        f"One tenant sends {row['offered']:.0f} requests a second over {row['connections']} connections {allowed}; "
        f"another one sends {PROBE:.0f} a second. The p99 of the other one is {row['ratio']:.2f} of that without "
        f"the load, by the median of the rounds. {_SHARED}"
    )
    head = ["load average", "quiet p50 ms", "p99 ms", "flooded p50 ms", "p99 ms", "ratio", "served of the flood"]
    head += ["refused", "not sent", "latest refusal s"]
    cells = []
    for turn in row["rounds"]:
        quiet, flooded, sent = turn["quiet"], turn["flooded"], turn["flood"]
        cells.append(
            [
                f"{turn['load']:.1f}",
                *(f"{told[key]:.1f}" for told in (quiet, flooded) for key in ("p50", "p99")),
                f"{flooded['p99'] / quiet['p99']:.2f}",
                *(f"{sent.get(status, 0):,}" for status in ("200", "429", "None")),
                f"{turn['refused_after']:.1f}",
            ]
        )
    return ["", said, "", *table(head, cells)]


def _overload_lines(row):
    said = (
        f"Two tenants send {row['offered']:.0f} requests a second together, within their rates, over "
        f"{row['connections']} connections, with `slowdown: {SETTINGS['overload']['slowdown']}`. The p99 of those that "
        f"are served is {row['ratio']:.2f} of that without the load, by the median of the rounds. {_SHARED}"
    )
    head = ["load average", "quiet p50 ms", "p99 ms", "overloaded p50 ms", "p99 ms", "ratio", "served a second"]
    head += ["refused", "not sent", "refusal p50 ms", "latest refusal s", "over after s"]
    cells = []
    for turn in row["rounds"]:
        quiet, busy = turn["quiet"], turn["busy"]
        cells.append(
            [
                f"{turn['load']:.1f}",
                *(f"{told[key]:.1f}" for told in (quiet, busy) for key in ("p50", "p99")),
                f"{busy['p99'] / quiet['p99']:.2f}",
                f"{turn['served_per_second']:.0f}",
                f"{turn['sent'].get('429', 0) + turn['busy'].get('429', 0):,}",
                f"{turn['sent'].get('None', 0) + turn['busy'].get('None', 0):,}",
                f"{turn['refused_p50']:.1f}",
                f"{turn['refused_after']:.2f}",
                f"{turn['recovered']:.1f}",
            ]
        )
    return ["", said, "", *table(head, cells)]
