"""Large JSON bodies are parsed beside other requests, with the result of `json.loads`."""

import asyncio
import json
import math
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from made_service import FEATURES, feature
from protodcs.serve.api import json_parsing
from protodcs.serve.api.json_parsing import LARGE, MAX_NUMBERS, MAX_PARTS, parse_json
from protodcs.serve.api.observations import handler
from test_service_app import AS_JSON, decisions_of, served, words_of

ROW = FEATURES[0].astype(float).tolist()
# Enough of them for a large body.
ROWS_OF_LARGE = 2 * LARGE // len(json.dumps(ROW))


class PausedConversion:
    """Converts numbers, and waits at the first one until `go_on` is set.

    Attributes:
        waiting: set as soon as a body waits.
        go_on: to be set.
    """

    def __init__(self, monkeypatch):
        self.waiting, self.go_on = threading.Event(), threading.Event()
        monkeypatch.setattr(json_parsing, "_to_float", self)

    def __call__(self, text):
        self.waiting.set()
        assert self.go_on.wait(60)
        return float(text)


async def test_other_requests_are_served_while_a_large_body_is_parsed(monkeypatch):
    conversion = PausedConversion(monkeypatch)
    async with served() as service:
        body = json.dumps({"features": [ROW] * ROWS_OF_LARGE}).encode()
        large = asyncio.create_task(service.observe(body, AS_JSON, path="s/peek"))
        await asyncio.to_thread(conversion.waiting.wait, 60)
        decisions_of(await service.observe(feature(1)))
        small = json.dumps({"features": [ROW]}).encode()
        decisions_of(await service.observe(small, AS_JSON))
        assert not large.done()
        conversion.go_on.set()
        assert len(decisions_of(await large)) == ROWS_OF_LARGE


async def test_the_rows_of_a_large_body_are_checked_in_the_thread_that_parsed_it(monkeypatch):
    threads = []

    def check(row):
        threads.append(threading.current_thread())
        return row

    async with served() as service:
        monkeypatch.setattr(handler, "ROW", SimpleNamespace(validate_python=check))
        body = json.dumps({"features": [ROW] * ROWS_OF_LARGE}).encode()
        decisions_of(await service.observe(body, AS_JSON, path="s/peek"))
    assert len(threads) == ROWS_OF_LARGE
    assert threading.main_thread() not in threads


async def test_a_new_stream_with_many_prototypes_is_parsed_beside_other_requests(monkeypatch):
    async with served() as service:
        conversion = PausedConversion(monkeypatch)
        rows = [[*ROW[:-1], number / 7] for number in range(ROWS_OF_LARGE)]
        large = asyncio.create_task(service.create(id="large", prototypes=rows))
        await asyncio.to_thread(conversion.waiting.wait, 60)
        decisions_of(await service.observe(feature(1)))
        conversion.go_on.set()
        assert (await large).status_code == 201


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner)))
async def test_a_large_body_has_the_value_that_json_loads_returns(value):
    body = json.dumps([value, " " * LARGE]).encode()
    parsed = await parse_json(body)
    # repr, because NaN is not equal to itself.
    assert repr(parsed) == repr(json.loads(body))


@pytest.mark.parametrize("end", [b"", b"]}", b"]]", b"],]", b'"]'])
async def test_a_large_body_that_is_no_json_is_a_decode_error(end):
    with pytest.raises(json.JSONDecodeError):
        await parse_json(b"[" + b"0.5," * LARGE + b"1" + end)


@pytest.mark.parametrize(
    ("part", "count", "words"),
    [
        (b"[],", MAX_PARTS, "lists, objects and quotation marks"),
        (b"{},", MAX_PARTS, "lists, objects and quotation marks"),
        (b'"",', MAX_PARTS // 2, "lists, objects and quotation marks"),
        (b"1,", MAX_NUMBERS, f"{MAX_NUMBERS} numbers"),
    ],
)
async def test_a_large_body_of_too_many_values_is_refused_before_it_is_parsed(part, count, words, monkeypatch):
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(HTTPException) as problem:
        await parse_json(b"[" + part * count + b"1,1]")
    assert problem.value.status_code == 422
    assert words in problem.value.detail


async def test_a_feature_of_too_many_numbers_is_422():
    async with served() as service:
        body = json.dumps({"features": [[0.5] * 16_385]}).encode()
        assert "16384 numbers" in words_of(await service.observe(body, AS_JSON), 422)


async def test_infinity_and_nan_of_a_large_body_are_422_as_in_a_small_one():
    async with served() as service:
        for value in (math.nan, math.inf):
            body = json.dumps({"features": [ROW] * ROWS_OF_LARGE + [[value, *ROW[1:]]]}).encode()
            assert "finite" in words_of(await service.observe(body, AS_JSON), 422)
