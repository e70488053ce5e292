"""What both clients share of httpx: its options, and what came of a request."""

import ssl
from typing import Any

import httpx

from ..errors import InputError, ServiceError
from .protocol import NoResponse, Response


def options(base_url: str, key: str | None, timeout: float, connections: int) -> dict[str, Any]:
    """Return the options of the client of httpx. Raise InputError if address or key cannot be used."""
    try:
        url = httpx.URL(base_url)
        whole = url.scheme in ("http", "https") and bool(url.host)
    except (httpx.InvalidURL, TypeError):
        whole = False
    if not whole:
        raise InputError(f"a service has an address such as 'http://127.0.0.1:8000'; given: {base_url!r}")
    if key is not None and not (key.isascii() and key.isprintable() and key == key.strip() and key):
        raise InputError("an access key is one word of printable ASCII characters: is there more in its file?")
    return {
        "base_url": base_url,
        "headers": {} if key is None else {"authorization": f"Bearer {key}"},
        # Who waits for a free connection has not been kept waiting by the service.
        "timeout": httpx.Timeout(timeout, pool=None),
        "limits": httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
    }


def as_response(response: httpx.Response) -> Response:
    """Return a response that was read."""
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Response(response.status_code, headers, response.content)


def no_response(problem: httpx.TransportError, url: httpx.URL) -> NoResponse:
    """Return what failed. Raise ServiceError if it will fail again."""
    # Without a password that may stand before it.
    address = f"{url.scheme}://{url.netloc.decode()}"
    cause: BaseException | None = problem
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            raise ServiceError(
                f"The certificate of {address} is not trusted: {cause.verify_message}. If it is yours, set "
                "SSL_CERT_FILE to the PEM file of its authority."
            ) from problem
        cause = cause.__cause__ or cause.__context__
    words = f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__
    return NoResponse(f"{address}: {words}")
