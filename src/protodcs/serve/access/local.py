"""Who may use a service without keys: programs on its own machine, and no web page that a browser there shows.

A browser on the machine reaches the service too. A page from elsewhere names itself in `Origin`; one whose name was
made to point to this machine (DNS rebinding) is found out by `Host`.
"""

import re

from starlette.responses import Response
from starlette.types import Scope

from ..settings import is_loopback
from .refusals import refusal

_HOST = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::\d*)?")


def refuse_others(scope: Scope) -> Response | None:
    """Return the refusal of a request that a service without keys must not serve; None if it may."""
    server = scope.get("server")
    if server is None or not is_loopback(server[0]):
        return _refusal("connections to a loopback address of its machine")
    hosts = [value.decode("latin-1").lower() for name, value in scope["headers"] if name.lower() == b"host"]
    if not all(_names_loopback(host) for host in hosts):
        return _refusal("requests whose Host is localhost or a loopback address")
    own = [f"{scope.get('scheme', 'http')}://{host}" for host in hosts]
    origins = [value.decode("latin-1").lower() for name, value in scope["headers"] if name.lower() == b"origin"]
    if not all(origin in own for origin in origins):
        return _refusal("requests of programs and of its own pages, not of web pages from elsewhere")
    return None


def _names_loopback(host: str) -> bool:
    found = _HOST.fullmatch(host)
    return found is not None and is_loopback(found[1] or found[2] or "")


def _refusal(served: str) -> Response:
    return refusal(403, f"Without keys the service answers only {served}. Set `keys` to serve others.")
