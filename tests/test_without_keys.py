"""A service without keys: only programs on its own machine are served, wherever it listens."""

import httpx
import pytest

from protodcs.serve.settings import is_loopback
from test_access import guarded
from test_service_app import served, status_of, words_of

pytestmark = pytest.mark.usefixtures("virtual_time")

OURS = "http://127.0.0.1:8000"


async def asked(service, base_url=OURS, headers=None):
    """Return the answer to a request that came to this address."""
    transport = httpx.ASGITransport(service.api)
    async with httpx.AsyncClient(transport=transport, base_url=base_url) as client:
        return await client.get("/v1/streams", headers=headers)


# Each request.


@pytest.mark.parametrize("server", ["10.0.0.7", "192.0.2.1", "[2001:db8::1]", "camera.example"])
async def test_a_connection_to_another_address_is_403(server):
    async with served() as service:
        answer = await asked(service, f"http://{server}:8000", {"host": "127.0.0.1:8000"})
        assert "loopback address of its machine" in words_of(answer, 403)


async def test_a_server_that_does_not_say_its_address_is_403():
    async with served() as service:
        assert await status_of(service.api, "/v1/streams", server=None) == 403


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "127.0.0.2", "localhost", "LocalHost:8000", "[::1]:8000", "[::1]"])
async def test_a_host_of_this_machine_is_served(host):
    async with served() as service:
        assert (await asked(service, headers={"host": host})).status_code == 200


HOSTS = ["rebound.example", "rebound.example:8000", "10.0.0.7:8000", "localhost.example", "127.0.0.1.example",
         "user@127.0.0.1", "127.0.0.1:8000:9", "", "localhost]", "0.0.0.0:8000", "[::]:8000", "\xe9"]  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
async def test_a_host_that_may_be_elsewhere_is_403(host):
    async with served() as service:
        answer = await asked(service, headers={"host": host.encode("latin-1")})
        assert "Host" in words_of(answer, 403)


@pytest.mark.parametrize("origin", ["http://127.0.0.1:8000", "HTTP://127.0.0.1:8000"])
async def test_the_pages_of_the_service_itself_are_served(origin):
    async with served() as service:
        assert (await asked(service, headers={"origin": origin})).status_code == 200


ORIGINS = ["https://evil.example", "null", "", "http://127.0.0.1:9000", "http://127.0.0.1", "https://127.0.0.1:8000",
           "http://localhost:8000", "http://127.0.0.1:8000.evil.example"]  # fmt: skip


@pytest.mark.parametrize("origin", ORIGINS)
async def test_a_web_page_from_elsewhere_is_403(origin):
    async with served() as service:
        assert "web pages from elsewhere" in words_of(await asked(service, headers={"origin": origin}), 403)


async def test_with_keys_every_address_is_served(tmp_path):
    async with guarded(tmp_path) as service:
        headers = {"authorization": f"Bearer {service.keys['acme read']}", "origin": "https://shop.example"}
        for base_url in ("http://10.0.0.7:8000", "http://camera.example"):
            assert (await asked(service, base_url, headers)).status_code == 200


@pytest.mark.parametrize(
    ("host", "local"),
    [("::ffff:127.0.0.1", True), ("::ffff:10.0.0.7", False), ("127.8.9.10", True), ("localhost.", False), ("", False)],
)
def test_loopback_addresses_in_other_notations(host, local):
    assert is_loopback(host) == local
