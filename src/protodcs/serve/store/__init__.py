"""Where streams are stored: SQLite for one process, PostgreSQL for many. The address chooses."""

from ...errors import ConfigError
from ..settings import ServeConfig
from .base import Store

__all__ = ["Store", "open_store"]


async def open_store(config: ServeConfig) -> Store:
    """Open the store that the settings name.

    Raises:
        ConfigError: a package is missing.
        StoreError: the store cannot be reached, or could lose acknowledged writes.
    """
    scheme, _, rest = config.store.partition(":")
    if scheme == "sqlite":
        from .sqlite import SqliteStore

        return SqliteStore(rest, config.reserve_bytes)
    try:
        from .postgres import PostgresStore
    except ModuleNotFoundError:
        raise ConfigError("A store in PostgreSQL needs psycopg: pip install 'protodcs[postgres]'.") from None

    database = PostgresStore(config.store, replicas=config.store_replicas)
    try:
        return await database.prepare()
    except BaseException:
        await database.close()
        raise
