"""Test the service on several hosts while packets between them are dropped, in both directions or in one.

After each partition every request must be applied exactly once and in order. The client retries each request with the
same key until the service acknowledges it.
"""

import asyncio
import itertools
import random
import time

import pytest

from service.hosts import MultiHostService
from service.network import Network, unavailable
from service.partitions import INGRESS_PARTITIONS, PARTITIONS, STORE_PARTITIONS
from service.traffic import Traffic

_REASON = unavailable()
pytestmark = [pytest.mark.skipif(bool(_REASON), reason=_REASON), pytest.mark.long]

_LEASE = 2.0
# Longer than the lease and than the timeouts of calls to the store, so that each of them expires.
_PARTITION = 8.0
# How long a test waits for a response during a partition, in seconds: each request may take 8 seconds.
_SERVED = 60.0
_STREAMS = 12
_prefixes = (f"run{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    settings = {"lease_seconds": _LEASE, "attempt_seconds": 2.0, "request_seconds": 8.0, "store_connect_timeout": 4.0}
    with (
        Network() as network,
        MultiHostService(network, tmp_path_factory.mktemp("hosts"), nodes=2, log_format="off", **settings) as service,
    ):
        print(f"Started in {service.start_seconds}")
        yield service


def traffic(service, **options):
    return Traffic([*service.base_urls().values()], service.key, streams=_STREAMS, prefix=next(_prefixes), **options)


async def check_exactly_once(traffic):
    """Check that each request has one position of its own, in the order in which the client sent them."""
    await traffic.finish()
    for stream in traffic.streams:
        count = len(stream.positions)
        assert stream.positions == list(range(count)), stream.name
        assert (await traffic.status(stream))["position"] == count, stream.name


def test_each_node_has_one_worker_and_one_ingress(service):
    names = sorted(node.name for node in service.nodes)
    assert sorted(host.name for host, _ in service.workers().values()) == names
    assert sorted(service.ingresses()) == names


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("failover", [True, False], ids=["client with failover", "client of one ingress"])
def test_requests_are_applied_exactly_once_across_a_partition(service, partition, failover):
    async def run():
        async with traffic(service, failover=failover) as client:
            await client.wait_acknowledged(5, since=0.0)
            print(await PARTITIONS[partition](service, random.Random(0), _PARTITION))
            await client.wait_acknowledged(5, since=time.monotonic())
            await check_exactly_once(client)
            print(client.summary())

    asyncio.run(run())


async def serve_during(service, partition, failover):
    """Wait until each stream is served during a partition, which lasts until then."""
    async with traffic(service, failover=failover) as client:
        await client.wait_acknowledged(5, since=0.0)
        struck = time.monotonic()
        fault = asyncio.create_task(PARTITIONS[partition](service, random.Random(0), 3600))
        try:
            # Requests that were sent before the packets were dropped do not count.
            await client.wait_acknowledged(3, since=struck + 1.0, timeout=_SERVED)
        finally:
            fault.cancel()
            await asyncio.gather(fault, return_exceptions=True)
            print(client.summary())
        await check_exactly_once(client)


@pytest.mark.parametrize("partition", STORE_PARTITIONS)
def test_other_workers_serve_the_streams_of_a_worker_without_store(service, partition):
    asyncio.run(serve_during(service, partition, failover=False))


@pytest.mark.parametrize("partition", INGRESS_PARTITIONS)
def test_clients_with_failover_are_served_while_an_ingress_cannot_reach_a_worker(service, partition):
    asyncio.run(serve_during(service, partition, failover=True))


@pytest.mark.parametrize("partition", INGRESS_PARTITIONS)
def test_an_ingress_serves_the_streams_of_a_worker_that_it_cannot_reach(service, partition):
    asyncio.run(serve_during(service, partition, failover=False))
