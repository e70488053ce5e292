"""Authentication and authorisation: callers are rejected before any route runs.

The response is the same whatever is wrong with a key. Each tenant has its own stream ids: `scoped_id` turns the id that
a caller sends into the id that the rest of the service uses, and nothing else may do so.
"""

import re
from urllib.parse import unquote_to_bytes

from starlette.requests import HTTPConnection
from starlette.types import Scope

from ..settings import scoped_name
from .headers import header_values
from .keys import Caller, Keys
from .local import reject_remote
from .problems import ProblemError
from .rules import RouteTable, Rule
from .sessions import Sessions

_NO_KEY = "The request has no access key. Send one in the header 'Authorization: Bearer pdcs_...'."
_WRONG_KEY = "The access key of the request is unknown, expired or revoked. Check it, or ask for a new one."


class Access:
    """Rejects callers that may not use a route. It stores who calls in `scope["state"]["caller"]`.

    A caller has an access key or, in a browser, a session cookie. If a request has both, the key counts.

    Args:
        keys: None lets every program on this machine do everything; the caller is then None.
        sessions: of browsers; None without keys.
        routes: the rules of all routes.
    """

    def __init__(self, keys: Keys | None, sessions: Sessions | None, routes: RouteTable):
        self._keys = keys
        self._sessions = sessions
        self._routes = routes

    async def check(self, scope: Scope) -> None:
        """Raise ProblemError if a request may not go on. Store what is found out about it in its state."""
        state = scope["state"]
        if not _is_utf_8(scope):
            raise ProblemError("invalid_request", "The path and the query must be UTF-8, percent-encoded.")
        found = self._routes.match(scope["path"].removeprefix(scope.get("root_path", "")))
        rule = state["rule"] = found.rules.get(scope["method"])
        state["stream"], state["route"] = found.stream, None if rule is None else found.path
        if self._keys is None:
            state["caller"] = None
            reject_remote(scope)
        elif rule is None or rule.role is not None:
            await self._authorise(scope, self._keys, rule)
        if rule is None:
            raise _wrong_method(found.rules) if found.rules else ProblemError("not_found", "There is no such route.")

    async def _authorise(self, scope: Scope, keys: Keys, rule: Rule | None) -> None:
        key = bearer(scope)
        caller = keys.caller(key)
        if caller is None and not key:
            caller = await self._signed_in(scope)
        if caller is None:
            scope["state"]["claimed"] = keys.claimed(key)
            raise ProblemError(
                "unauthenticated", _WRONG_KEY if key else _NO_KEY, headers={"WWW-Authenticate": "Bearer"}
            )
        scope["state"]["caller"] = caller
        denial = None if rule is None else rule.denial(caller)
        if denial is not None:
            raise ProblemError("forbidden", denial)

    async def _signed_in(self, scope: Scope) -> Caller | None:
        """Return who signed in with the browser that sent a request."""
        if self._sessions is None or not self._sessions.has_cookie(scope):
            return None
        found = await self._sessions.of_request(scope)
        if found is None:
            return None
        scope["state"]["session"], caller = found
        return caller


def _is_utf_8(scope: Scope) -> bool:
    """Return whether path and query are UTF-8. Servers replace other bytes, so that the path names another stream."""
    raw_path, query = scope.get("raw_path") or b"", scope["query_string"]
    try:
        if not scope["path"].isascii():
            scope["path"].encode()
        for part in (raw_path, query):
            if b"%" in part or not part.isascii():
                unquote_to_bytes(part).decode()
    except UnicodeError:
        return False
    return True


def _wrong_method(rules: dict[str, Rule]) -> ProblemError:
    return ProblemError(
        "method_not_allowed", f"This path takes {', '.join(rules)}.", headers={"Allow": ", ".join(rules)}
    )


def bearer(scope: Scope) -> str:
    """Return the key of a request; empty if there is none, or more than one."""
    given = header_values(scope, b"authorization")
    scheme, _, key = (given[0] if len(given) == 1 else b"").decode("latin-1").partition(" ")
    return key.strip(" ") if scheme.lower() == "bearer" else ""


def tenant_of_caller(http: HTTPConnection) -> str:
    """Return the tenant of a request; empty without keys."""
    caller: Caller | None = http.scope["state"]["caller"]
    return "" if caller is None else caller.tenant


def scoped_id(http: HTTPConnection, stream: str) -> str:
    """Return the id that the service uses for a stream of the caller. With keys it begins with the tenant."""
    state = http.scope["state"]
    # Routes without a key have no caller, and fail here.
    caller: Caller | None = state["caller"]
    if state["stream"] is None:
        state["stream"] = stream
    return stream if caller is None else scoped_name(caller.tenant, stream)


def without_tenant(http: HTTPConnection, message: str) -> str:
    """Return a message from inside the service, with stream ids as the caller knows them."""
    caller: Caller | None = http.scope.get("state", {}).get("caller")
    return message if caller is None else re.sub(rf"""(['"]){caller.tenant}/""", r"\1", message)
