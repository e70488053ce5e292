"""The service against its own description: whatever the OpenAPI document allows or forbids, answers are as it says.

Schemathesis makes the requests. The application runs in its event loop, with a worker and a store in memory.
"""

import os
from functools import partial

import numpy as np
import pytest
import schemathesis
from hypothesis import settings
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from made_service import ROWS
from protodcs.core.prototypes import Prototypes
from protodcs.serve.stream.shared import pack_prototypes
from test_access import Guarded, made_keys
from test_service_app import FakeEncoding, Service

# That a feature has the width of its stream and is not zero is nothing that a schema can say.
BEYOND_SCHEMAS = [positive_data_acceptance]
# A request that would be wrong for want of a key gets one here.
BEYOND_KEYS = [*BEYOND_SCHEMAS, negative_data_rejection]
# Random requests for each route. There are others that try each constraint of the schema once.
RANDOM = settings(max_examples=int(os.environ.get("PROTODCS_OPENAPI_EXAMPLES", 5)))


class Living:
    """An application in the event loop it is served in: a service for each operation, with a stream "s"."""

    def __init__(self, make, create):
        self._make = make
        self._create = create
        self._service = self._serves = None
        # The operation that is tried. A change of it starts a new service.
        self.operation = None

    async def __call__(self, scope, receive, send):
        if scope["type"] != "lifespan":
            if self._serves != self.operation:
                await self._restart()
            # Schemathesis calls it "testserver", which a service without keys refuses.
            headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
            local = {"server": ("127.0.0.1", 80), "headers": [*headers, (b"host", b"127.0.0.1")]}
            await self._service.api({**scope, **local}, receive, send)
            return
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def _restart(self):
        await self._stop()
        self._service, self._serves = self._make(), self.operation
        await self._service.worker.start()
        assert (await self._create(self._service)).status_code == 201

    async def _stop(self):
        if self._service is not None:
            await self._service.client.aclose()
            await self._service.worker.close()


class Naming(FakeEncoding):
    """Knows every name."""

    async def prototypes(self, classes):
        made = Prototypes(np.random.default_rng(len(classes)).normal(size=(len(classes), ROWS.shape[1])))
        return made.fingerprint, pack_prototypes(made)


@schemathesis.serializer("application/x-ndjson", "image/*", "application/x-float32", "application/x-float16")
def as_bytes(context, value):
    """Images and lines are bytes, whatever stands in for them."""
    return value if isinstance(value, bytes) else str(value).encode()


def described(make, create):
    """The description of a service, to be tried on one that is made in the event loop."""
    schema = schemathesis.openapi.from_dict(make().api.openapi())
    schema.app = Living(make, create)
    # Random bodies may be too large.
    rejection = schema.config.checks.negative_data_rejection
    rejection.expected_statuses = [*rejection.expected_statuses, "413"]
    return schema


# These are fixtures because every worker of pytest imports this file, but few run its tests.
@pytest.fixture
def without_keys(request, tmp_path):
    request.node._nodeid = request.node.nodeid  # schemathesis reads it, and pytest 9.2 has no such attribute any more
    return described(lambda: Service(Naming(), audit=str(tmp_path / "audit")), Service.create)


@pytest.fixture
def with_keys(request, tmp_path):
    request.node._nodeid = request.node.nodeid
    make = partial(Guarded, tmp_path, Naming(), rate=1e6, burst=1_000_000)
    schema = described(make, lambda service: service.made("operator admin"))
    # Constraints do not depend on keys.
    schema.config.phases.coverage.enabled = False
    return schema


# An operator may do everything.
KEY = {"Authorization": f"Bearer {made_keys()[2]['operator admin']}"}


def operations(fixture):
    """The operations of a description, which is made when a test needs it. Those of events never end."""
    return schemathesis.pytest.from_fixture(fixture).exclude(path_regex="/events$")


def on_known_stream(case):
    """Have a case speak of the stream that is there; False where it names none, or would delete it."""
    if "stream" not in case.path_parameters or (case.method, case.path) == ("DELETE", "/v1/streams/{stream}"):
        return False
    case.path_parameters["stream"] = "s"
    return True


def check(case, excluded, **more):
    """The answer is as described, for a stream of any name and for one that is there."""
    # The usual limit of ten seconds is too short on a loaded machine.
    more["timeout"] = 300
    case.operation.app.operation = case.operation.label
    case.call_and_validate(excluded_checks=excluded, **more)
    if on_known_stream(case):
        case.call_and_validate(excluded_checks=excluded, **more)


@operations("without_keys").parametrize()
@RANDOM
def test_answers_are_as_described(case):
    check(case, BEYOND_SCHEMAS)


@operations("with_keys").parametrize()
@RANDOM
def test_answers_to_a_key_are_as_described(case):
    check(case, BEYOND_KEYS, headers=KEY)
