"""Transactions as the rules of a SQL store see them, and what they add to the usage of tenants."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Rows = list[tuple[Any, ...]]


class Transaction:
    """Statements that have their effect together or not at all. `?` stands for a value, `{rows}` for a table of values.

    Attributes:
        added: what the transaction adds to the usage of each tenant: streams, bytes, and bytes of logs.
        ends: where the journals end to which it appends.
    """

    def __init__(self) -> None:
        self.added: dict[bytes, list[int]] = {}
        self.ends: dict[str, int] = {}

    async def rows(self, statement: str, *values: Any) -> Rows:
        """Execute a statement, and return its rows."""
        (found,) = await self.rows_of_all((statement, *values))
        return found

    async def rows_of_all(self, *statements: tuple[Any, ...]) -> list[Rows]:
        """Execute statements with their values in one round trip, and return the rows of each."""
        raise NotImplementedError

    async def run(self, statement: str, *values: Any) -> None:
        """Execute a statement. An error may come later, before the end of the transaction."""
        raise NotImplementedError

    async def run_many(self, statement: str, types: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Execute a statement whose `{rows}` are these rows of values, if there are any; `types` are their types."""
        raise NotImplementedError

    async def rows_of_many(self, statement: str, types: str, rows: Sequence[tuple[Any, ...]]) -> Rows:
        """Do the same, and return the rows of the result."""
        raise NotImplementedError

    async def change_all(self, statement: str, types: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Change one row of a table for each row of values. Raise StaleError if one is missing, possibly later."""
        raise NotImplementedError

    async def wait_turn(self, tenant: bytes) -> None:
        """Wait until no other transaction that called this for the tenant is under way."""
        raise NotImplementedError


Rule = Callable[[Transaction], Awaitable[T]]


class StaleError(Exception):
    """A row is not as this process remembers it, so the transaction had no effect."""


async def add_to_usage(tx: Transaction, shard: int) -> None:
    """Write what a transaction adds to the usage of tenants, as its last step."""
    await tx.run_many(
        f"INSERT INTO usage SELECT column1, {shard}, column2, column3, column4 FROM {{rows}} WHERE true "
        "ON CONFLICT (tenant, shard) DO UPDATE SET streams = usage.streams + excluded.streams, "
        "bytes = usage.bytes + excluded.bytes, log_bytes = usage.log_bytes + excluded.log_bytes",
        "bytea bigint bigint bigint",
        [(tenant, *added) for tenant, added in sorted(tx.added.items()) if any(added)],
    )


def add_usage(tx: Transaction, tenant: bytes, *, streams: int = 0, size: int = 0, log_size: int = 0) -> None:
    """Count what a transaction adds to the usage of a tenant."""
    total = tx.added.setdefault(tenant, [0, 0, 0])
    total[0] += streams
    total[1] += size
    total[2] += log_size


def to_bytes(text: str) -> bytes:
    """Return a name as bytes; half a surrogate pair, which JSON can contain, is a name like any other."""
    return text.encode("utf-8", "surrogatepass")


def to_text(name: bytes) -> str:
    """Return the name that `to_bytes` turned into bytes."""
    return name.decode("utf-8", "surrogatepass")
