"""What the service says of itself: numbers, readiness, logs and traces, and what dashboard and alerts make of them."""

import asyncio
import io
import json
import logging
import re
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from made_service import FEATURES, PROTOTYPES, ask, create, done, feature, handled, observe, settings, started
from memory_store import MemoryStore
from prometheus_server import FILES, promtool
from protodcs import methods
from protodcs.errors import ConfigError
from protodcs.serve.messages import Action, Reply, ReplyStatus, WorkerLostError
from protodcs.serve.store.values import Fence
from protodcs.serve.stream.answers import unpack_decision
from protodcs.serve.telemetry import logs, readiness, traces
from protodcs.serve.telemetry.gathering import Gathering
from protodcs.serve.telemetry.metrics import EncoderMetrics, IngressMetrics
from protodcs.serve.telemetry.readiness import Readiness
from protodcs.serve.workers import stream_statistics as statistics_module
from protodcs.serve.workers.stream_statistics import StreamStatistics
from protodcs.serve.workers.worker import Worker
from test_service_app import BYTES, PNG, FakeEncoding, served

pytestmark = pytest.mark.usefixtures("virtual_time")

ROOT = Path(__file__).parent.parent
BOARD = json.loads((ROOT / "deploy" / "grafana" / "protodcs.json").read_text())
RULES = yaml.safe_load((FILES / "rules.yml").read_text())["groups"][0]["rules"]
METRIC = re.compile(r"\b(?:protodcs|http|process)_\w+")


def samples(report, name):
    """The samples of a name in families: {labels without the process, as a frozenset: value}."""
    return {
        frozenset(sample.labels.items()): sample.value
        for family in report
        for sample in family.samples
        if sample.name == name
    }


def value(report, name, **labels):
    """One sample."""
    return samples(report, name)[frozenset(labels.items())]


def page_of(worker):
    """The page of a whole service: a worker, HTTP and an encoder."""
    registries = [IngressMetrics(100).registry, EncoderMetrics().registry]
    gathered = Gathering(lease=5.0, parts=("workers", "store", "encoder"), registries=registries)
    gathered.put(worker.metrics(), {})
    return gathered


# The page.


async def test_the_page_is_valid_in_both_formats_and_every_family_is_there_once():
    async with started() as worker:
        await done(worker, *(observe(number) for number in range(20)))
        registry = page_of(worker).registry
    text = generate_latest(registry).decode()
    found = list(parse_text(text))
    assert list(parse_openmetrics(generate_openmetrics(registry).decode()))
    assert len({family.name for family in found}) == len(found) > 30
    assert all(family.name.startswith(("protodcs_", "http_", "process_")) and family.documentation for family in found)
    assert not [family.name for family in found if family.name.endswith("_created")]
    assert value(found, "protodcs_worker_step_seconds_count") == 20
    assert value(found, "protodcs_ingress_waiting_limit_requests") == 100
    promtool("check", "metrics", text=text)


async def test_no_label_holds_what_callers_make_up():
    secret = 'camera-of-"mr\\smith"'
    async with started(streams=(secret,)) as worker:
        await done(worker, observe(0, secret))
        page = generate_latest(page_of(worker).registry).decode()
    assert "protodcs_worker_loaded_streams" in page
    assert "smith" not in page


async def test_whoever_asks_for_readiness_costs_one_look_a_second(monkeypatch):
    now, looks = 1000.0, 0
    monkeypatch.setattr(readiness.time, "monotonic", lambda: now)

    class Control:
        async def facts(self):
            nonlocal looks
            looks += 1
            await asyncio.sleep(0)
            if looks == 2:
                raise WorkerLostError("the worker is not there")
            return [{"draining": False, "store_silence_seconds": 0.0, "store_problem": ""}]

    shared = Readiness(Control(), None, lease=5.0)
    impatient = asyncio.create_task(shared.failing())
    await asyncio.sleep(0)
    impatient.cancel()
    assert await asyncio.gather(*(shared.failing() for _ in range(100))) == [{}] * 100
    now += 0.9
    assert (await shared.failing(), looks) == ({}, 1)
    now += 0.2
    assert (await shared.failing(), looks) == ({"workers": "the worker does not answer: WorkerLostError"}, 2)
    now += 1.1
    assert (await shared.failing(), looks) == ({}, 3)


def test_the_page_says_which_part_fails():
    gathered = Gathering(lease=5.0, parts=("workers", "store"), registries=[])

    def ready():
        found = samples(gathered.registry.collect(), "protodcs_ready")
        return {dict(labels)["part"]: bool(value) for labels, value in found.items()}

    gathered.put([], {})
    assert ready() == {"workers": True, "store": True}
    gathered.put([], {"store": "silent"})
    assert ready() == {"workers": True, "store": False}


def test_a_page_whose_port_is_taken_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics_port={port}"):
            Gathering(lease=5.0, parts=(), registries=[]).listen("127.0.0.1", port)


# What a worker counts.


async def test_a_worker_counts_what_its_engines_decided():
    async with started(streams=("s", "t")) as worker:
        replies = await done(worker, *(observe(number) for number in range(60)))
        await done(worker, ask(Action.PEEK, payload=feature(0)), observe(3))
        decisions, report = [unpack_decision(reply.answer) for reply in replies], worker.metrics()
    known = sum(decision.known for decision in decisions)
    assert 0 < known < 60
    assert value(report, "protodcs_decisions_total", verdict="known") == known
    assert value(report, "protodcs_decisions_total", verdict="unknown") == 60 - known
    for gate in ("trusted", "cached", "evolved"):
        passed = sum(getattr(decision, gate) for decision in decisions)
        assert value(report, "protodcs_gate_passes_total", gate=gate) == passed
    assert value(report, "protodcs_decision_openness_count") == 60
    total = sum(decision.openness for decision in decisions)
    assert value(report, "protodcs_decision_openness_sum") == pytest.approx(total)
    below = sum(decision.openness <= 0.5 for decision in decisions)
    assert value(report, "protodcs_decision_openness_bucket", le="0.5") == below
    assert (
        value(report, "protodcs_worker_unsnapshotted_records")
        == value(report, "protodcs_worker_unsnapshotted_records_max")
        == 60
    )
    assert value(report, "protodcs_worker_loaded_streams") == 1


async def test_waking_sleeping_fenced_writes_and_a_store_that_is_down_are_counted():
    store = MemoryStore()
    async with started(store, lease_seconds=0.3, store_connect_timeout=0.05, attempt_seconds=0.1) as worker:
        await done(worker, observe(0))
        store.down = True
        await asyncio.sleep(0.25)
        (refused,) = await handled(worker, [observe(1)])
        assert refused.status is ReplyStatus.LATER
        down = worker.metrics()
        store.down = False
        await asyncio.sleep(0.15)
        await done(worker, observe(1))
        store.content["s"].fence = Fence(9, "of another worker")
        assert (await handled(worker, [observe(2)]))[0].status is ReplyStatus.LATER
        await done(worker, observe(2))
        after = worker.metrics()
        await worker.drain(Reply(ReplyStatus.CLOSED, "over"))
        ended, facts = worker.metrics(), worker.facts()
    assert value(down, "protodcs_worker_store_errors_total") >= 2
    assert value(down, "protodcs_store_silence_seconds") > 0.2 > value(after, "protodcs_store_silence_seconds")
    assert value(down, "protodcs_worker_fenced_writes_total") == 0
    assert value(after, "protodcs_worker_fenced_writes_total") == 1
    assert value(after, "protodcs_worker_load_seconds_count") >= 2
    assert value(ended, "protodcs_worker_unloads_total") == 1
    assert value(ended, "protodcs_worker_loaded_streams") == 0
    assert facts["draining"]


async def test_a_commit_that_hangs_shows_as_lag_and_its_followers_as_queue():
    store = MemoryStore()
    async with started(store, streams=("s", "t")) as worker:
        await done(worker, observe(0), observe(0, "t"))
        store.gate = asyncio.Event()
        first = asyncio.create_task(handled(worker, [observe(1)]))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(handled(worker, [observe(1, "t")]))
        await asyncio.sleep(0.05)
        held = worker.metrics()
        store.gate.set()
        await asyncio.gather(first, second)
        after = worker.metrics()
    assert value(held, "protodcs_store_lag_seconds") >= 0.09
    assert value(held, "protodcs_worker_queued_writes") == 1
    assert value(after, "protodcs_store_lag_seconds") == value(after, "protodcs_worker_queued_writes") == 0
    assert value(after, "protodcs_worker_commit_seconds_sum") >= 0.09


def test_a_guard_that_fires_is_counted_by_its_kind():
    worker = Worker("worker-0", MemoryStore(), settings())
    worker.counted.guards.labels("drift").inc()
    worker.counted.guards.labels("drift").inc()
    assert value(worker.metrics(), "protodcs_guard_events_total", kind="drift") == 2


# How streams fare.


class Stub:
    """As much of a live stream as is looked at."""

    different = 0

    def __init__(self, count, frozen=False, method="streamdcs"):
        self.engine = methods.create(method, PROTOTYPES)
        self.engine.observe_many(FEATURES[:count])
        if frozen:
            self.engine.freeze()


def test_the_numbers_of_streams_are_summarised():
    paper = {"a": Stub(50, method="protodcs"), "b": Stub(100, method="protodcs")}
    streams = {**paper, "c": Stub(200, frozen=True)}
    statistics = StreamStatistics()
    statistics.update(streams, budget=60.0)
    report = list(statistics.families())
    weight = streams["c"].engine.stats()["head_weight"]
    assert value(report, "protodcs_streams_head_weight", stat="max") == pytest.approx(weight)
    assert value(report, "protodcs_streams_possibly_shifted") == 0
    ratios = [stats["unknown"] / stats["learned"] for stats in (stream.engine.stats() for stream in paper.values())]
    ratios.append(streams["c"].engine.stats()["share_unknown"])
    assert value(report, "protodcs_streams_unknown_ratio", stat="max") == pytest.approx(max(ratios))
    medians = [stream.engine.stats()["openness_median"] for stream in paper.values()]
    assert value(report, "protodcs_streams_openness_median", stat="median") == pytest.approx(np.median(medians))
    assert value(report, "protodcs_streams_openness_median", stat="max") == pytest.approx(max(medians))
    rates = [stats["trusted"] / stats["learned"] for stats in (stream.engine.stats() for stream in paper.values())]
    assert value(report, "protodcs_streams_trusted_ratio", stat="min") == pytest.approx(min(rates))
    assert value(report, "protodcs_streams_frozen") == 1
    del streams["c"]
    statistics.update(streams, budget=60.0)
    assert value(list(statistics.families()), "protodcs_streams_frozen") == 0


def test_streams_that_possibly_shifted_are_counted():
    shifted = Stub(200)
    stats = shifted.engine.stats()
    assert "reason" in stats
    shifted.engine = type("Engine", (), {"quick_stats": lambda _: {**stats, "reason": "possible shift"}})()
    statistics = StreamStatistics()
    statistics.update({"a": shifted, "b": Stub(200)}, budget=60.0)
    assert value(list(statistics.families()), "protodcs_streams_possibly_shifted") == 1


def test_an_update_without_time_continues_where_the_last_one_ended_and_all_streams_get_their_turn(monkeypatch):
    looked = []
    # A look at one stream takes longer than the budget.
    monkeypatch.setattr(statistics_module.time, "perf_counter", lambda: 0.002 * len(looked))

    class Slow(Stub):
        def __init__(self, name):
            super().__init__(50)
            stats = self.engine.stats()
            self.engine = type("Engine", (), {"quick_stats": lambda _: (looked.append(name), stats)[1]})()

    streams = {name: Slow(name) for name in "abcde"}
    statistics = StreamStatistics()
    for _ in range(5):
        statistics.update(streams, budget=0.001)
    assert looked == list("abcde")
    statistics.update(streams, budget=0.001)
    assert looked == list("abcdea")


def test_a_damaged_engine_does_not_hide_the_numbers_of_the_others():
    broken = Stub(50)
    broken.engine = None
    statistics = StreamStatistics()
    statistics.update({"a": broken, "b": Stub(50, frozen=True)}, budget=60.0)
    assert value(list(statistics.families()), "protodcs_streams_frozen") == 1


# Requests.


async def test_requests_are_counted_by_route_and_status_and_timed_by_stage():
    async with served(FakeEncoding()) as service:
        for number in range(3):
            await service.observe(feature(number))
        await service.post("s/observe", b"0 7", PNG)
        await service.post("s/observe", b"broken", PNG)
        await service.post("nobody/observe", feature(0), BYTES)
        await service.client.get("/v1/streams/s")
        await service.client.get("/nowhere/at/all")
        report = list(service.queues.metrics.registry.collect())
    route = "/v1/streams/{stream}/observe"
    counted = {
        (labels["method"], labels["route"], labels["code"]): count
        for key, count in samples(report, "http_request_duration_seconds_count").items()
        for labels in [dict(key)]
    }
    assert counted["POST", route, "200"] == 4
    assert counted["POST", route, "422"] == counted["POST", route, "404"] == 1
    assert counted["GET", "/v1/streams/{stream}", "200"] == counted["GET", "other", "404"] == 1
    assert value(report, "protodcs_encode_seconds_count") == 2
    assert value(report, "protodcs_route_seconds_count") >= 6
    assert value(report, "protodcs_group_seconds_count") > 0
    assert value(report, "protodcs_ingress_waiting_requests") == 0


async def test_a_caller_that_goes_away_is_no_failure_of_the_service(caplog):
    with caplog.at_level(logging.DEBUG, "protodcs.serve.api.request_log"):
        async with served() as service:
            service.store.down = True
            asking = asyncio.create_task(service.observe(feature(0)))
            await asyncio.sleep(0.1)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            report = list(service.queues.metrics.registry.collect())
    labels = {"route": "/v1/streams/{stream}/observe", "method": "POST", "code": "499"}
    assert value(report, "http_request_duration_seconds_count", **labels) == 1
    assert [record.levelname for record in caplog.records if record.name == "protodcs.serve.api.request_log"][
        -1
    ] == "WARNING"


async def test_retries_late_and_refused_requests_are_counted_by_their_reason():
    async with served(request_seconds=0.3, store_connect_timeout=0.02, max_queued_requests=2) as service:
        await service.observe(feature(0))
        many = await service.client.post(
            "/v1/streams/s/observe?count=3", content=b"".join(feature(n) for n in range(3)), headers=BYTES
        )
        assert many.status_code == 429
        service.store.down = True
        assert (await service.observe(feature(1))).status_code == 503
        report = list(service.queues.metrics.registry.collect())
    assert value(report, "protodcs_ingress_given_up_total", reason="overloaded") == 1
    assert value(report, "protodcs_ingress_given_up_total", reason="late") == 1
    assert value(report, "protodcs_ingress_retries_total", reason="later") >= 1
    assert value(report, "protodcs_ingress_retries_total", reason="moved") == 0


# Alive, and ready.


async def test_ready_names_the_part_that_fails_while_the_process_is_alive(monkeypatch):
    monkeypatch.setattr(readiness, "_FRESH", -1.0)

    class Deaf(FakeEncoding):
        async def facts(self):
            if self.broken:
                raise RuntimeError("secret")
            return await super().facts()

    encoding = Deaf()
    encoding.broken = False
    async with served(encoding, lease_seconds=0.3) as service:
        said = []

        async def look():
            answer = await service.client.get("/v1/ready")
            said.append((answer.status_code, answer.json().get("detail", "")))
            assert (await service.client.get("/v1/health")).status_code == 200

        await look()
        encoding.broken = True
        await look()
        service.store.down = True
        await asyncio.sleep(0.5)
        await look()
        service.store.down = encoding.broken = False
        await asyncio.sleep(0.3)
        await look()
        await service.worker.drain(Reply(ReplyStatus.CLOSED, "over"))
        await look()
        well, deaf, down, again, stopped = said
    assert well == again == (200, "")
    assert deaf == (503, "encoder: the encoder does not answer: RuntimeError")
    assert down[0] == 503
    assert "store: the store has not answered" in down[1]
    assert "encoder" in down[1]
    assert stopped == (503, "workers: the service is being stopped")


# Logs.


@pytest.fixture
def log():
    """A service's log as `log(kind, level)` starts it: the text that was written since."""
    root, text = logging.getLogger("protodcs"), io.StringIO()
    before = root.handlers, root.level, root.propagate

    def start(kind, level="info"):
        logs.start(kind, level, "ingress-1")
        if kind != "off":
            root.handlers[0].setStream(text)
        return text

    yield start
    root.handlers, root.level, root.propagate = before[0], before[1], before[2]
    root.setLevel(before[1])


async def visited(stream="camera-7"):
    """Requests of all sorts on a stream with a name and a body that must not be told."""
    async with served() as service:
        await done(service.worker, create(stream))
        headers = {**BYTES, "x-request-id": "caller-17"}
        await service.post(f"{stream}/observe", feature(0), headers)
        await service.post(f"{stream}/observe", b"secret body", headers)
        await service.post(f"{stream}/freeze", headers={"x-request-id": "forged\tid"})

        def broken(*_, **__):
            raise ZeroDivisionError("a bug")

        service.worker.streams.loaded[stream].live.engine._advance = broken
        await service.post(f"{stream}/observe", feature(1), headers)


async def test_a_log_is_one_json_object_on_each_line_with_the_request_and_without_content(log):
    text = log("json")
    await visited()
    lines = [json.loads(line) for line in text.getvalue().splitlines()]
    assert all({"time", "level", "process", "event"} <= set(line) for line in lines)
    requests = [line for line in lines if line["event"] == "request"]
    wrong = next(line for line in requests if line["code"] == 422)
    assert (wrong["request_id"], wrong["level"], wrong["stream"]) == ("caller-17", "warning", "camera-7")
    assert wrong["reason"]
    frozen = next(line for line in requests if "freeze" in line["route"])
    assert re.fullmatch("[0-9a-f]{32}", frozen["request_id"])
    assert any("ZeroDivisionError" in line.get("error", "") for line in lines)
    assert not [line for line in requests if line["code"] == 200 and "observe" in line["route"]]
    assert "secret" not in text.getvalue()


async def test_a_log_of_level_debug_has_every_observe_text_is_for_people_and_off_is_silent(log):
    text = log("text", "debug")
    await visited()
    line = next(line for line in text.getvalue().splitlines() if "code=200" in line and "observe" in line)
    assert " debug ingress-1 request " in line
    assert "request_id=caller-17" in line
    with pytest.raises(json.JSONDecodeError):
        json.loads(line)
    before = text.getvalue()
    log("off")
    await visited()
    assert text.getvalue() == before


# Traces.


@pytest.fixture
def spans(monkeypatch):
    """The finished spans of a tracer that records."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(traces, "_tracer", provider.get_tracer("test"))
    # FastAPI would take this one for spans of its own.
    monkeypatch.setattr("opentelemetry.trace._TRACER_PROVIDER", provider)
    yield exporter.get_finished_spans
    provider.shutdown()


async def test_one_trace_goes_from_the_caller_through_encoder_and_worker_to_the_commit(spans):
    caller = f"00-{0xABC:032x}-{0xDEF:016x}-01"
    async with served(FakeEncoding()) as service:
        answer = await service.post("s/observe", b"0 3", {**PNG, "traceparent": caller})
        assert answer.status_code == 200
    found = [span for span in spans() if span.context.trace_id == 0xABC]
    ours = {span.name: span for span in found}
    route = "POST /v1/streams/{stream}/observe"
    assert sorted(span.name for span in found) == sorted([route, "encode", "route", "step", "commit"])
    assert ours[route].parent.span_id == 0xDEF
    assert ours[route].attributes["http.response.status_code"] == 200
    for name, parent in (("encode", route), ("route", route), ("step", route), ("commit", "step")):
        assert ours[name].parent.span_id == ours[parent].context.span_id, name


async def test_a_batch_of_several_requests_is_one_span_with_links_to_all_of_them(spans):
    async with started() as worker:
        marks = [f"00-{number:032x}-{number:016x}-01" for number in (1, 2, 3)]
        await done(worker, *(observe(number, trace=mark) for number, mark in enumerate(marks)))
    (batch,) = (span for span in spans() if span.name == "step")
    assert batch.parent.span_id == 1
    assert [link.context.span_id for link in batch.links] == [2, 3]
    assert batch.attributes["requests"] == 3


async def logged_by(log, caller):
    """The lines of requests that belong to a trace of the caller."""
    text = log("json")
    async with served() as service:
        await service.client.get("/v1/streams/none", headers={"traceparent": caller})
        await service.client.get("/v1/streams/none")
    found = [json.loads(line) for line in text.getvalue().splitlines()]
    return [line for line in found if line["event"] == "request"][-2:]


async def test_lines_of_the_log_have_the_ids_of_their_trace_and_span(spans, log):
    of_caller, own = await logged_by(log, f"00-{17:032x}-{5:016x}-01")
    assert of_caller["trace_id"] == f"{17:032x}"
    recorded = {f"{span.context.span_id:016x}": f"{span.context.trace_id:032x}" for span in spans()}
    assert [recorded[line["span_id"]] for line in (of_caller, own)] == [of_caller["trace_id"], own["trace_id"]]


async def test_without_a_tracer_lines_have_the_trace_of_their_caller(log):
    of_caller, without = await logged_by(log, f"00-{17:032x}-{5:016x}-01")
    assert of_caller["trace_id"] == f"{17:032x}"
    assert "trace_id" not in without
    forged, _ = await logged_by(log, "00-nonsense\x1b-1-01")
    assert "trace_id" not in forged


def test_without_a_tracer_requests_carry_nothing():
    request = observe(0)
    assert traces.marked([request]) == [request]
    assert traces.carried() == ""


def test_tracing_names_a_function_that_is_called_or_an_error_that_says_what_is_wanted():
    traces.start(None)
    for wrong in ("nowhere.at_all:f", "json:there_is_none"):
        with pytest.raises(ConfigError, match="MODULE:FUNCTION"):
            traces.start(wrong)
    with pytest.raises(ConfigError):
        settings(tracing="no function")
    before = list(_CALLED)
    traces.start(f"{__name__}:called")
    assert len(_CALLED) == len(before) + 1


_CALLED = []


def called():
    _CALLED.append(1)


# Dashboard and alerts.


async def exported():
    """Every name that a service may show, those of its samples too."""
    async with started() as worker:
        await done(worker, *(observe(number) for number in range(3)))
        families = list(page_of(worker).registry.collect())
    names = set()
    for family in families:
        if family.type == "histogram":
            names |= {f"{family.name}_{part}" for part in ("bucket", "sum", "count")}
        else:
            names.add(f"{family.name}_total" if family.type == "counter" else family.name)
    return names


def expressions():
    return [(panel["title"], target["expr"]) for panel in BOARD["panels"] for target in panel.get("targets", [])]


async def test_dashboard_and_alerts_name_only_what_the_service_exports_and_the_page_describes_all():
    names = await exported()
    used = {name for _, expression in expressions() for name in METRIC.findall(expression)}
    alerting = {name for rule in RULES for name in METRIC.findall(rule["expr"])}
    assert used <= names, used - names
    assert alerting <= names, alerting - names
    described = set(METRIC.findall((ROOT / "docs" / "reference" / "metrics.md").read_text()))
    families_of = {re.sub("_(bucket|sum|count)$", "", name) if name not in described else name for name in names}
    assert families_of <= described, families_of - described


def test_the_dashboard_has_panels_that_do_not_overlap_and_questions_that_have_names():
    taken = set()
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    for panel in BOARD["panels"]:
        assert panel["type"] in ("row", "stat", "timeseries")
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        questions = panel.get("targets", [])
        assert bool(questions) == (panel["type"] != "row")
        assert len({question["refId"] for question in questions}) == len(questions)
        assert all(question["datasource"]["uid"] == "${datasource}" for question in questions)
    assert [variable["name"] for variable in BOARD["templating"]["list"]] == ["datasource"]


def test_every_alert_says_what_is_wrong_and_where_to_read_what_to_do():
    headings = re.findall(r"^#+ (\w+)$", (ROOT / "docs" / "how-to" / "operate.md").read_text(), re.MULTILINE)
    assert {rule["alert"] for rule in RULES} <= set(headings)
    described = (ROOT / "docs" / "how-to" / "monitor.md").read_text()
    for rule in RULES:
        section = f"/how-to/operate/#{rule['alert'].lower()}"
        assert rule["annotations"]["runbook_url"] == "{{ $externalLabels.docs_url }}" + section
        assert rule["annotations"]["summary"]
        assert f"| [{rule['alert']}](operate.md#{rule['alert'].lower()}) | " in described
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_prometheus_takes_the_configuration_and_every_alert_fires_when_it_should_and_only_then():
    promtool("check", "config", FILES / "prometheus.yml")
    promtool("check", "config", FILES / "compose.yml")
    promtool("test", "rules", FILES / "rules_test.yml")
    tested = yaml.safe_load((FILES / "rules_test.yml").read_text())["tests"]
    fires, quiet = ({t["name"].split()[0] for t in tested if t["name"].endswith(end)} for end in ("fires", "quiet"))
    assert fires == quiet == {rule["alert"] for rule in RULES}


# What it costs.


@pytest.mark.long
async def test_counting_costs_less_than_three_percent_of_an_observe_through_a_worker():
    class Nothing:
        """A worker's metrics that count nothing."""

        writing = None

        def __getattr__(self, name):
            return lambda *_: None

    async with started() as counted, started() as plain:
        plain.counted = plain._commits._metrics = Nothing()
        times = {id(counted): [], id(plain): []}
        for turn in range(300):
            for worker in (counted, plain) if turn % 2 else (plain, counted):
                before = time.thread_time()
                for number in range(100):
                    await handled(worker, [observe(number, key=f"{turn}/{number}")])
                times[id(worker)].append(time.thread_time() - before)
        ratios = np.array(times[id(counted)]) / np.array(times[id(plain)])
    print(f"with counting an observe takes {np.median(ratios):.4f} of the time ({np.quantile(ratios, (0.25, 0.75))})")
    assert np.median(ratios) < 1.03
