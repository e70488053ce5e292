"""Protect a service without keys: only programs on its own machine may use it, and no web page from elsewhere.

A browser on the machine reaches the service too. A page from elsewhere names itself in `Origin`. A page whose name was
made to point to this machine (DNS rebinding) shows in `Host`.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

from starlette.types import Scope

from ..settings import is_loopback
from .headers import header_values
from .problems import ProblemError

# Nearly all requests name one of a few addresses.
_is_loopback = lru_cache(maxsize=100)(is_loopback)
_HOST = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::\d*)?")


def reject_remote(scope: Scope) -> None:
    """Raise ProblemError for a request that a service without keys must not serve."""
    server = scope.get("server")
    if server is None or not _is_loopback(server[0]):
        raise _forbidden("connections to a loopback address of its machine")
    hosts = header_values(scope, b"host")
    if not all(map(_names_loopback, hosts)):
        raise _forbidden("requests whose Host is localhost or a loopback address")
    if b"origin" in scope["state"]["headers"] and not is_own_page(scope, [scope.get("scheme", "http")]):
        raise _forbidden("requests of programs and of its own pages, not of web pages from elsewhere")


def is_own_page(scope: Scope, schemes: Sequence[str]) -> bool:
    """Return whether each origin of a request is the host that it names, with one of these schemes."""
    hosts = [host.decode("latin-1").lower() for host in header_values(scope, b"host")]
    own = {f"{scheme}://{host}" for host in hosts for scheme in schemes}
    return all(origin.decode("latin-1").lower() in own for origin in header_values(scope, b"origin"))


@lru_cache(maxsize=100)
def _names_loopback(host: bytes) -> bool:
    found = _HOST.fullmatch(host.decode("latin-1").lower())
    return found is not None and is_loopback(found[1] or found[2] or "")


def _forbidden(served: str) -> ProblemError:
    return ProblemError("forbidden", f"Without keys the service answers only {served}. Set `keys` to serve others.")
