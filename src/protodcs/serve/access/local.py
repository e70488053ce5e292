"""Protect a service without keys: only programs on its own machine may use it, and no web page from elsewhere.

A browser on the machine reaches the service too. A page from elsewhere names itself in `Origin`. A page whose name was
made to point to this machine (DNS rebinding) shows in `Host`.
"""

import re
from functools import lru_cache

from starlette.types import Scope

from ..settings import is_loopback
from .problems import ProblemError

# Nearly all requests name one of a few addresses.
_is_loopback = lru_cache(maxsize=100)(is_loopback)
_HOST = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::\d*)?")


def reject_remote(scope: Scope) -> None:
    """Raise ProblemError for a request that a service without keys must not serve."""
    server = scope.get("server")
    if server is None or not _is_loopback(server[0]):
        raise _forbidden("connections to a loopback address of its machine")
    hosts, origins = header_values(scope, b"host"), header_values(scope, b"origin")
    if not all(_names_loopback(host) for host in hosts):
        raise _forbidden("requests whose Host is localhost or a loopback address")
    own = [f"{scope.get('scheme', 'http')}://{host}" for host in hosts]
    if not all(origin in own for origin in origins):
        raise _forbidden("requests of programs and of its own pages, not of web pages from elsewhere")


def header_values(scope: Scope, wanted: bytes) -> list[str]:
    """Return the values of a header, in lower case."""
    return [value.decode("latin-1").lower() for name, value in scope["headers"] if name.lower() == wanted]


@lru_cache(maxsize=100)
def _names_loopback(host: str) -> bool:
    found = _HOST.fullmatch(host)
    return found is not None and is_loopback(found[1] or found[2] or "")


def _forbidden(served: str) -> ProblemError:
    return ProblemError("forbidden", f"Without keys the service answers only {served}. Set `keys` to serve others.")
