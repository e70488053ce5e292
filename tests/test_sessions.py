"""Sign-in for browsers: the cookie, the pages that may use it, and how a session ends."""

import asyncio
import time

import pytest

from protodcs.serve.access import sessions
from protodcs.serve.access.keys import revoke_key
from test_access import guarded
from test_service_app import served, words_of

pytestmark = pytest.mark.usefixtures("virtual_time")

OWN_PAGE = {"sec-fetch-site": "same-origin"}
NAME = "protodcs_session_8000"


async def signed_in(service, who="acme observe", **more):
    """Sign in, and return the token in the cookie."""
    response = await service.ask(who, "POST", "/v1/session", **more)
    assert response.status_code == 201, response.text
    return response.headers["set-cookie"].split(";")[0].partition("=")[2]


def with_cookie(token, **headers):
    return {"cookie": f"{NAME}={token}", **{name.replace("_", "-"): value for name, value in headers.items()}}


async def test_a_cookie_stands_for_the_key_that_signed_in(tmp_path):
    async with guarded(tmp_path) as service:
        response = await service.ask("acme observe", "POST", "/v1/session")
        cookie = response.headers["set-cookie"]
        assert "; HttpOnly; SameSite=Strict" in cookie
        assert "; Path=/; Max-Age=43200;" in cookie
        assert "Secure" not in cookie
        assert cookie.startswith(NAME + "=")
        about = {"tenant": "acme", "role": "observe", "key_id": service.records["acme observe"].id}
        assert about.items() <= response.json().items()
        own = with_cookie(cookie.split(";")[0].partition("=")[2], **OWN_PAGE)
        assert (await service.ask(None, "GET", "/v1/streams/s", own)).status_code == 200
        assert (await service.ask(None, "GET", "/v1/session", own)).json()["role"] == "observe"
        # The cookie allows what the key allows, and no more.
        words_of(await service.ask(None, "POST", "/v1/streams/s/freeze", own), 403)


async def test_a_cookie_is_for_https_alone_if_the_browser_speaks_https(tmp_path):
    async with guarded(tmp_path) as service:
        response = await service.ask("acme read", "POST", "/v1/session", {"x-forwarded-proto": "https"})
        assert response.headers["set-cookie"].endswith("; Secure")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec_fetch_site": "same-origin"}, 200),
        ({"origin": "http://127.0.0.1"}, 200),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site"}, 403),
        ({"sec_fetch_site": "none"}, 403),
        ({}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:81", "sec_fetch_site": "same-origin"}, 403),
        ({"origin": "null"}, 403),
    ],
)
async def test_a_cookie_counts_only_for_requests_of_the_own_pages(tmp_path, headers, status):
    async with guarded(tmp_path) as service:
        token = await signed_in(service)
        response = await service.ask(None, "GET", "/v1/streams/s", with_cookie(token, **headers))
        assert response.status_code == status


async def test_a_session_ends_with_its_key_with_its_time_and_with_a_sign_out(tmp_path, monkeypatch):
    async with guarded(tmp_path) as service:
        first, second = await signed_in(service), await signed_in(service, "acme read")
        own = with_cookie(first, **OWN_PAGE)
        gone = await service.ask(None, "DELETE", "/v1/session", own)
        assert gone.status_code == 204
        assert f"{NAME}=; Path=/; Max-Age=0" in gone.headers["set-cookie"]
        words_of(await service.ask(None, "GET", "/v1/session", own), 401)
        other = with_cookie(second, **OWN_PAGE)
        assert (await service.ask(None, "GET", "/v1/session", other)).status_code == 200
        revoke_key(service.file, service.records["acme read"].id)
        await asyncio.sleep(1.1)
        words_of(await service.ask(None, "GET", "/v1/session", other), 401)
        third = with_cookie(await signed_in(service), **OWN_PAGE)
        now = time.time()
        monkeypatch.setattr(sessions.time, "time", lambda: now + 43_190)
        renewed = await service.ask(None, "GET", "/v1/session", third)
        later = with_cookie(renewed.headers["set-cookie"].split(";")[0].partition("=")[2], **OWN_PAGE)
        monkeypatch.setattr(sessions.time, "time", lambda: now + 43_210)
        words_of(await service.ask(None, "GET", "/v1/session", third), 401)
        assert (await service.ask(None, "GET", "/v1/session", later)).status_code == 200
        # A sign-out ends the renewed cookies of a session too.
        assert (await service.ask(None, "DELETE", "/v1/session", later)).status_code == 204
        words_of(await service.ask(None, "GET", "/v1/session", later), 401)


async def test_a_forged_or_damaged_cookie_is_no_cookie(tmp_path):
    async with guarded(tmp_path) as service:
        token = await signed_in(service)
        version, key, expires, nonce, mac = token.split(".")
        admin = service.records["acme admin"].id
        forged = [
            "",
            "x",
            "....",
            f"{version}.{admin}.{expires}.{nonce}.{mac}",
            f"{version}.{key}.{int(expires) + 1}.{nonce}.{mac}",
            f"{version}.{key}.{expires}.{nonce}.",
            token[:-1],
            token + "A",
            "a" * 10_000,
            "\u00e9.\u00e9",
        ]
        for one in forged:
            cookie = {"cookie": f"{NAME}={one}".encode("latin-1"), **OWN_PAGE}
            words_of(await service.ask(None, "GET", "/v1/session", cookie), 401)
        # Other cookies of the host do not matter.
        more = {"cookie": f"a b; c=; {NAME}_other=1; {NAME}={token}", **OWN_PAGE}
        assert (await service.ask(None, "GET", "/v1/session", more)).status_code == 200


async def test_sign_in_is_in_the_audit_log_without_key_and_cookie(tmp_path):
    async with guarded(tmp_path) as service:
        token = await signed_in(service)
        (line,) = [line for line in service.lines() if line["action"] == "sign in"]
        assert line["key"] == service.records["acme observe"].id
        text = service.audit.read_text()
        assert token not in text
        assert service.keys["acme observe"] not in text


async def test_if_the_store_does_not_respond_a_cookie_is_not_rejected_but_the_request_fails(tmp_path):
    async with guarded(tmp_path) as service:
        service.store.down = True
        words_of(await service.ask("acme read", "POST", "/v1/session"), 503)


async def test_without_keys_everyone_on_the_machine_is_an_admin():
    async with served() as service:
        for method in ("GET", "POST"):
            response = await service.client.request(method, "/v1/session")
            assert response.json() == {
                "tenant": None,
                "role": "admin",
                "images": True,
                "key_id": None,
                "expires": None,
            }
            assert "set-cookie" not in response.headers
        assert (await service.client.delete("/v1/session")).status_code == 204
