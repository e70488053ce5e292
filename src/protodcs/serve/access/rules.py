"""Who may do what: a key is asked for before any route runs, and a table says which role each route needs.

A route that is not in the table is not there for anyone who needs a key. Whatever is wrong with a key, the answer is
the same. Tenants have names of their own for their streams: `scoped` makes of them the names that the rest of the
service knows, and nothing else may.
"""

import re
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .keys import OPERATOR, ROLES, Caller, Keys, Role
from .local import refuse_others
from .refusals import refusal

_NO_KEY = (
    "a key is needed: send the header 'Authorization: Bearer pdcs_...'; one that is unknown, expired or revoked is none"
)


class Rule(NamedTuple):
    """What a route needs.

    Attributes:
        action: what it does, in a word, for the audit log.
        role: the least role that may; None: no key is needed.
        operator: only keys of the operator may.
    """

    action: str
    role: Role | None
    operator: bool = False

    def refuses(self, caller: Caller) -> str | None:
        """Why a caller may not, in words; None if they may."""
        if self.operator and caller.tenant != OPERATOR:
            return f"this is for the tenant {OPERATOR!r}"
        if self.role is not None and ROLES.index(caller.role) < ROLES.index(self.role):
            return f"this needs a key with the role {self.role}; the one given has the role {caller.role}"
        return None


_STREAM = "/v1/streams/{stream}"

RULES: dict[tuple[str, str], Rule] = {
    ("GET", "/v1/health"): Rule("health", None),
    ("GET", "/v1/ready"): Rule("health", None),
    ("GET", "/openapi.json"): Rule("description", "read"),
    ("GET", "/docs"): Rule("description", "read"),
    ("GET", "/docs/oauth2-redirect"): Rule("description", "read"),
    ("GET", "/redoc"): Rule("description", "read"),
    ("GET", "/v1/streams"): Rule("list", "read"),
    ("GET", _STREAM): Rule("status", "read"),
    ("GET", f"{_STREAM}/snapshots"): Rule("snapshots", "read"),
    ("POST", f"{_STREAM}/observe"): Rule("observe", "observe"),
    ("POST", f"{_STREAM}/peek"): Rule("peek", "observe"),
    ("POST", f"{_STREAM}/explain"): Rule("explain", "observe"),
    ("GET", f"{_STREAM}/decisions"): Rule("decisions", "read"),
    ("GET", f"{_STREAM}/state"): Rule("export", "admin"),
    ("PUT", f"{_STREAM}/state"): Rule("import", "admin"),
    ("POST", f"{_STREAM}/classes"): Rule("add class", "admin"),
    ("DELETE", f"{_STREAM}/classes/{{name}}"): Rule("remove class", "admin"),
    ("DELETE", f"{_STREAM}/snapshots/{{name}}"): Rule("forget", "admin"),
    ("GET", "/v2"): Rule("description", "read"),
    ("GET", "/v2/health/live"): Rule("health", None),
    ("GET", "/v2/health/ready"): Rule("health", None),
    ("GET", "/v2/models/{model}"): Rule("description", "read"),
    ("GET", "/v2/models/{model}/ready"): Rule("health", None),
    ("POST", "/v2/models/{model}/infer"): Rule("observe", "observe"),
    ("POST", "/v1/streams"): Rule("create", "admin"),
    ("DELETE", _STREAM): Rule("delete", "admin"),
    ("POST", f"{_STREAM}/freeze"): Rule("freeze", "admin"),
    ("POST", f"{_STREAM}/unfreeze"): Rule("unfreeze", "admin"),
    ("POST", f"{_STREAM}/reset"): Rule("reset", "admin"),
    ("POST", f"{_STREAM}/snapshots"): Rule("snapshot", "admin"),
    ("POST", f"{_STREAM}/rollback"): Rule("rollback", "admin"),
    ("GET", "/v1/owners"): Rule("owners", "admin", operator=True),
    ("PUT", "/v1/owners"): Rule("resize", "admin", operator=True),
}


def _pattern(path: str) -> re.Pattern[str]:
    """What matches a path of the table: a part in braces stands for anything but a slash, a name for anything."""
    named = re.escape(path).replace(r"\{name\}", "(?P<name>.+)")
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^/]+)", named), re.DOTALL)


_BY_PATH: list[tuple[str, re.Pattern[str], dict[str, Rule]]] = [
    (path, _pattern(path), {method: rule for (method, other), rule in RULES.items() if other == path})
    for path in dict.fromkeys(path for _, path in RULES)
]


class Access:
    """Lets those in who may, and says who they are in `scope["state"]["caller"]`.

    Args:
        app: what comes behind.
        keys: None lets every program on this machine do everything; the caller is then None.
    """

    def __init__(self, app: ASGIApp, keys: Keys | None):
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            answer = self._refused(scope)
            await (self._app if answer is None else answer)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _refused(self, scope: Scope) -> Response | None:
        """Why a request may not go on; it leaves with the request what was found out about it."""
        state = scope.setdefault("state", {})
        if not _is_utf_8(scope):
            return refusal(422, "The path and the query must be UTF-8, percent-encoded.")
        path, rules, state["stream"] = rules_of(scope)
        rule = state["rule"] = rules.get(scope["method"])
        state["route"] = None if rule is None else path
        if self._keys is None:
            state["caller"] = None
            return refuse_others(scope) or (_wrong_method(rules) if rules and rule is None else None)
        if rule is not None and rule.role is None:
            # Nobody asked for a key, so there is no caller: `scoped` fails on such a route.
            return None
        key = bearer(scope)
        caller = self._keys.caller(key)
        if caller is None:
            state["claimed"] = self._keys.claimed(key)
            return refusal(401, _NO_KEY, {"WWW-Authenticate": "Bearer"})
        state["caller"] = caller
        if rule is None:
            return _wrong_method(rules) if rules else refusal(404, "Not Found")
        words = rule.refuses(caller)
        return None if words is None else refusal(403, words)


def _is_utf_8(scope: Scope) -> bool:
    """Return whether path and query are UTF-8. Servers replace other bytes, so that the path names another stream."""
    try:
        scope["path"].encode()
        for part in (scope.get("raw_path") or b"", scope["query_string"]):
            unquote_to_bytes(part).decode()
    except UnicodeError:
        return False
    return True


def _wrong_method(rules: dict[str, Rule]) -> Response:
    """The refusal that names all methods of a path, which are routes of their own and know of themselves only."""
    return refusal(405, "Method Not Allowed", {"Allow": ", ".join(rules)})


def rules_of(scope: Scope) -> tuple[str | None, dict[str, Rule], str | None]:
    """Which path of the table a path is, its rules by method, and the stream that it names."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    for known, pattern, rules in _BY_PATH:
        found = pattern.fullmatch(path)
        if found is not None:
            return known, rules, found.groupdict().get("stream")
    return None, {}, None


def bearer(scope: Scope) -> str:
    """The key of a request; empty where there is none, or more than one."""
    given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
    scheme, _, key = (given[0] if len(given) == 1 else b"").decode("latin-1").partition(" ")
    return key.strip(" ") if scheme.lower() == "bearer" else ""


def scoped(http: HTTPConnection, stream: str) -> str:
    """The name that the service has for a stream of the caller. With keys it begins with the tenant.

    No tenant's name and no id holds a slash, so what one tenant asks for is never what another one has.
    """
    caller: Caller | None = http.scope["state"]["caller"]
    if http.scope["state"]["stream"] is None:
        http.scope["state"]["stream"] = stream
    return stream if caller is None else f"{caller.tenant}/{stream}"


def own(http: HTTPConnection, streams: list[str]) -> list[str]:
    """Of all streams those of the caller, by the caller's names."""
    caller: Caller | None = http.scope["state"]["caller"]
    if caller is None:
        return streams
    start = f"{caller.tenant}/"
    return [stream.removeprefix(start) for stream in streams if stream.startswith(start)]


def in_own_words(http: HTTPConnection, words: str) -> str:
    """Words from inside the service, with the caller's names of streams in them."""
    caller: Caller | None = http.scope.get("state", {}).get("caller")
    return words if caller is None else re.sub(rf"""(['"]){caller.tenant}/""", r"\1", words)
