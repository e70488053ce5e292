"""Being connected to Ray for as long as a command works."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...errors import InputError


@contextmanager
def connected(address: str, without: str, **resources: Any) -> Iterator[None]:
    """Be connected to the Ray cluster at `address`; "local" is one of our own, for this command.

    A cluster that this process is connected to already is used and left as it is. `without` says how a user does
    without Ray; `resources` are what a cluster of our own shall have.
    """
    try:
        import ray
    except ImportError:
        raise InputError(f"this needs Ray: pip install 'protodcs[ray]', or {without}") from None
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    mine = not ray.is_initialized()
    if mine:
        # A cluster of others has its dashboard or has none. Without an address Ray would join whichever runs here.
        own: dict[str, Any] = {"include_dashboard": False, **resources} if address == "local" else {}
        try:
            ray.init(address, log_to_driver=False, logging_level="ERROR", **own)
        except (ConnectionError, ValueError) as problem:
            raise InputError(f"no Ray cluster at {address!r}: {str(problem).splitlines()[0]}") from None
    try:
        yield
    finally:
        if mine:
            ray.shutdown()
