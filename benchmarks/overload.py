"""Latency of one tenant while another one uses the most expensive streams that the service allows.

A probe sends requests at a steady rate, in turns: alone, beside the load, and beside a process that computes the steps
of the load outside of the service. The last one shows what sharing the processor costs in any case. The load comes from
its own process at the lowest priority. Probe and load are open loops: they do not wait for responses.
"""

import json
import multiprocessing
import os
import time
from collections import Counter
from contextlib import contextmanager

import numpy as np

from benchmarks.load import Sender
from benchmarks.timing import clip_stream, table

# The probe: requests a second, connections, seconds of a run.
PROBE, PROBE_CONNECTIONS, SECONDS = 40.0, 16, 30.0
TENANTS = ("calm", "flood")
# The tenant with the most expensive streams: requests a second, features of each, connections. The
# service can serve that many.
EXPENSIVE, FEATURES_TOGETHER, EXPENSIVE_CONNECTIONS = 10.0, 10, 16
# So long it runs before anything is measured.
BEFORE = 3.0
# The priority of Ray's workers.
WORKER_NICENESS = 15


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
    settings that were tried these take the longest: about a third of the estimate that the limits are
    compared with, once each class has samples.
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


def senders_of(rig, streams=8):
    """Create streams and return {tenant: Sender of observes on them}. Those of the tenant `flood` are expensive."""
    prototypes, features = clip_stream("dtd")
    senders = {}
    for name in TENANTS:
        if name == "flood":
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


@contextmanager
def computing_outside(config):
    """Compute as many of the most expensive steps per second as the load asks for, in a process without a service."""
    process = multiprocessing.get_context("spawn").Process(target=_compute, args=(config,), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _compute(config):
    from protodcs import ProtoDCS, ProtoDCSConfig

    os.nice(WORKER_NICENESS)
    prototypes, options = most_expensive(config, clip_stream("dtd")[0])
    engine = ProtoDCS(prototypes, config=ProtoDCSConfig(**options["config"]))
    rows = prototypes.astype(np.float32)
    for row in rows:
        engine.observe(row)
    start, step = time.monotonic(), 0
    while True:
        for _ in range(FEATURES_TOGETHER):
            engine.observe(rows[step % len(rows)])
            step += 1
        time.sleep(max(0.0, start + step / (FEATURES_TOGETHER * EXPENSIVE) - time.monotonic()))


def expensive(rig, quick, rounds=5, seconds=SECONDS):
    """Yield a row: the latency of one tenant, in turns alone, beside other computing, and beside another tenant."""
    if quick:
        rounds, seconds = 1, 5.0
    senders = senders_of(rig)

    def probe():
        return senders["calm"].send(PROBE, PROBE_CONNECTIONS, seconds)

    probe()
    turns = []
    for _ in range(rounds):
        load = os.getloadavg()[0]
        quiet = probe()
        with computing_outside(rig.config):
            # The engine has to see each class first.
            time.sleep(3 * BEFORE)
            outside = probe()
        with senders["flood"].beside(EXPENSIVE, EXPENSIVE_CONNECTIONS, BEFORE + seconds) as outcome:
            time.sleep(BEFORE)
            flooded = probe()
            sent = outcome()
        turns.append(
            {
                "load": load,
                "quiet": {"p50": p50(quiet), "p99": p99(quiet), **statuses(quiet)},
                "outside": {"p50": p50(outside), "p99": p99(outside), **statuses(outside)},
                "flooded": {"p50": p50(flooded), "p99": p99(flooded), **statuses(flooded)},
                "flood": statuses(sent),
                "refused_after": max((took for _, status, took in sent if status == 429), default=0.0),
            }
        )
        print(json.dumps(turns[-1]), flush=True)
        time.sleep(2)
    yield {
        "task": "expensive",
        "ratio": float(np.median([turn["flooded"]["p99"] / turn["quiet"]["p99"] for turn in turns])),
        "ratio_outside": float(np.median([turn["outside"]["p99"] / turn["quiet"]["p99"] for turn in turns])),
        "offered": EXPENSIVE,
        "connections": EXPENSIVE_CONNECTIONS,
        "rounds": turns,
    }


def lines_of(row):
    """Return the lines of a row for the results page; none for a row of another part."""
    if row["task"] != "expensive":
        return []
    said = (
        f"One tenant sends {row['offered']:.0f} requests per second over {row['connections']} connections, each with "
        f"{FEATURES_TOGETHER} features, to eight streams with the most expensive settings that are allowed. Another "
        f"tenant sends {PROBE:.0f} requests per second. Its p99 is {row['ratio']:.2f} times its p99 without the load "
        f"(median of the rounds). A process that computes the same steps outside of the service makes it "
        f"{row['ratio_outside']:.2f} times as long. The load average is from before the round:"
    )
    head = ["load average", "alone p50 ms", "p99 ms", "computing outside p50 ms", "p99 ms", "loaded p50 ms", "p99 ms"]
    head += ["loaded / alone", "load: 200"]
    head += ["429", "not sent", "latest 429 s"]
    cells = []
    for turn in row["rounds"]:
        quiet, flooded, sent = turn["quiet"], turn["flooded"], turn["flood"]
        cells.append(
            [
                f"{turn['load']:.1f}",
                *(f"{told[key]:.1f}" for told in (quiet, turn["outside"], flooded) for key in ("p50", "p99")),
                f"{flooded['p99'] / quiet['p99']:.2f}",
                *(f"{sent.get(status, 0):,}" for status in ("200", "429", "None")),
                f"{turn['refused_after']:.1f}",
            ]
        )
    return ["", said, "", *table(head, cells)]
