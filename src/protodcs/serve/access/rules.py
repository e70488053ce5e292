"""Access rules: which role each route needs, and which route a path belongs to.

A route declares its rule with `requires`, beside its path. The service doesn't start with a route that has no rule.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, TypeVar

from starlette.routing import compile_path

from .keys import OPERATOR, ROLES, Caller, Role

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


@dataclass(slots=True)
class Rule:
    """What a route needs. As a decorator, it declares the rule of a route.

    Attributes:
        role: the lowest role that may use it; None if no key is needed.
        action: what the route does, for the audit log.
        operator: only keys of the operator may use it.
        audited: whether the audit log has a line for each request. By default, if it needs an admin or returns images.
        max_body: maximum bytes of a body; None for the limit of the tenant.
        streamed: the body is read piece by piece for as long as it comes, so its size and time have no limit.
        images: only keys that may see images may use it.
    """

    role: Role | None
    action: str
    _: KW_ONLY
    operator: bool = False
    audited: bool | None = None
    max_body: int | None = None
    streamed: bool = False
    images: bool = False

    def __post_init__(self) -> None:
        if self.audited is None:
            self.audited = self.role == "admin" or self.images

    def __call__(self, endpoint: Endpoint) -> Endpoint:
        """Declare the rule of a route."""
        endpoint.rule = self  # type: ignore[attr-defined]
        return endpoint

    def denial(self, caller: Caller) -> str | None:
        """Return why a caller may not use the route; None if they may."""
        if self.operator and caller.tenant != OPERATOR:
            return f"Only the tenant {OPERATOR!r} may do this."
        if self.role is not None and ROLES.index(caller.role) < ROLES.index(self.role):
            return f"This needs a key with the role {self.role}. The given key has the role {caller.role}."
        if self.images and not caller.images:
            return "This needs a key that may see images. Create one with `protodcs keys create --images`."
        return None


# Beside the path of a route, this reads as a sentence.
requires = Rule


class Match(NamedTuple):
    """The route that a path belongs to.

    Attributes:
        path: the path with its parameters in braces; None if there is no such route.
        rules: by method.
        stream: the stream that the path names.
    """

    path: str | None
    rules: dict[str, Rule]
    stream: str | None = None


_NO_MATCH = Match(None, {})


class RouteTable:
    """Finds the rules of a path, in the order and by the patterns in which the application finds its routes.

    >>> table = RouteTable([("GET", "/v1/streams/{stream}", Rule("read", "status"))])
    >>> table.match("/v1/streams/camera-7").stream
    'camera-7'
    """

    def __init__(self, rules: Iterable[tuple[str, str, Rule]]):
        by_path: defaultdict[str, dict[str, Rule]] = defaultdict(dict)
        for method, path, rule in rules:
            by_path[path][method] = rule
            if method == "GET":
                by_path[path]["HEAD"] = rule
        self._routes = [(compile_path(path)[0], path.replace(":path}", "}"), found) for path, found in by_path.items()]

    def match(self, path: str) -> Match:
        """Return the route of a path."""
        for pattern, name, rules in self._routes:
            found = pattern.match(path)
            if found is not None:
                return Match(name, rules, found.groupdict().get("stream"))
        return _NO_MATCH
