"""Access rules: which role each route needs, and which route a path belongs to.

A route declares its rule with `requires`, beside its path. The service doesn't start with a route that has no rule.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from .keys import OPERATOR, ROLES, Caller, Role

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


class Rule(NamedTuple):
    """What a route needs.

    Attributes:
        action: what the route does, for the audit log.
        role: the lowest role that may use it; None if no key is needed.
        operator: only keys of the operator may use it.
        audited: whether the audit log has a line for each request.
        max_body: maximum bytes of a body; None for the limit of the tenant.
        streamed: the body is read piece by piece for as long as it comes, so its size and time have no limit.
        images: only keys that may see images may use it.
    """

    action: str
    role: Role | None
    operator: bool = False
    audited: bool = False
    max_body: int | None = None
    streamed: bool = False
    images: bool = False

    def denial(self, caller: Caller) -> str | None:
        """Return why a caller may not use the route; None if they may."""
        if self.operator and caller.tenant != OPERATOR:
            return f"Only the tenant {OPERATOR!r} may do this."
        if self.role is not None and ROLES.index(caller.role) < ROLES.index(self.role):
            return f"This needs a key with the role {self.role}. The given key has the role {caller.role}."
        if self.images and not caller.images:
            return "This needs a key that may see images. Create one with `protodcs keys create --images`."
        return None


def requires(
    role: Role | None,
    action: str,
    *,
    operator: bool = False,
    audited: bool | None = None,
    max_body: int | None = None,
    streamed: bool = False,
    images: bool = False,
) -> Callable[[Endpoint], Endpoint]:
    """Declare the rule of a route.

    By default, the audit log has a line for each request that needs an admin or returns images.
    """
    audited = role == "admin" or images if audited is None else audited
    rule = Rule(action, role, operator, audited, max_body, streamed, images)

    def declare(endpoint: Endpoint) -> Endpoint:
        endpoint.rule = rule  # type: ignore[attr-defined]
        return endpoint

    return declare


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


@dataclass(slots=True)
class _Node:
    """What may follow the first segments of a path."""

    literal: dict[str, "_Node"] = field(default_factory=dict)
    # A parameter followed by a literal, such as `{cluster}:name`, by that literal.
    ending: dict[str, "_Node"] = field(default_factory=dict)
    parameter: "tuple[str, _Node] | None" = None
    # A parameter that takes all the rest of the path.
    rest: "_Node | None" = None
    path: str | None = None
    rules: dict[str, Rule] = field(default_factory=dict)


class RouteTable:
    """Finds the rules of a path. A literal segment wins over a parameter.

    >>> table = RouteTable([("GET", "/v1/streams/{stream}", Rule("status", "read"))])
    >>> table.match("/v1/streams/camera-7").stream
    'camera-7'

    Args:
        rules: method, path and rule of each route.
    """

    def __init__(self, rules: Iterable[tuple[str, str, Rule]]):
        self._root = _Node()
        for method, path, rule in rules:
            node = self._root
            for segment in path.split("/")[1:]:
                node = _next(node, segment)
            node.path = path.replace(":path}", "}")
            node.rules[method] = rule
            if method == "GET":
                node.rules["HEAD"] = rule

    def match(self, path: str) -> Match:
        """Return the route of a path."""
        node, stream = self._root, None
        segments = path.split("/")
        for at in range(1, len(segments)):
            segment = segments[at]
            found = node.literal.get(segment) or node.ending.get(":" + segment.rpartition(":")[2])
            if found is None and node.parameter is not None and segment:
                name, found = node.parameter
                if name == "stream":
                    stream = segment
            if found is None:
                rest = node.rest
                return _NO_MATCH if rest is None or segments[at:] == [""] else Match(rest.path, rest.rules, stream)
            node = found
        return _NO_MATCH if node.path is None else Match(node.path, node.rules, stream)


def _next(node: _Node, segment: str) -> _Node:
    """Return the node behind a segment of a route's path; make it if it is not there."""
    if not segment.startswith("{"):
        return node.literal.setdefault(segment, _Node())
    if not segment.endswith("}"):
        return node.ending.setdefault(segment.partition("}")[2], _Node())
    if segment.endswith(":path}"):
        node.rest = node.rest or _Node()
        return node.rest
    node.parameter = node.parameter or (segment[1:-1], _Node())
    return node.parameter[1]
