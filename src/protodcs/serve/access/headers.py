"""The headers of a request, by name. Servers give names in lower case."""

from starlette.types import Scope


def index_headers(scope: Scope) -> None:
    """Store the headers of a request by name in its state, the first of each, and whether there are more of one."""
    given: list[tuple[bytes, bytes]] = scope["headers"]
    # The last of a name counts in a dictionary.
    found = dict(reversed(given))
    scope["state"] |= {"headers": found, "repeated_headers": len(found) < len(given)}


def header(scope: Scope, name: bytes) -> str | None:
    """Return the first value of a header; None if the request has none."""
    value = scope["state"]["headers"].get(name)
    return None if value is None else value.decode("latin-1")


def header_values(scope: Scope, name: bytes) -> list[bytes]:
    """Return all values of a header."""
    state = scope["state"]
    if state["repeated_headers"]:
        return [value for found, value in scope["headers"] if found == name]
    value = state["headers"].get(name)
    return [] if value is None else [value]
