"""Where streams are stored: SQLite for one process, PostgreSQL or Redis for many. The address chooses."""

from ...errors import ConfigError, without_passwords
from ..settings import ServeConfig
from .base import Store

__all__ = ["Store", "open_store"]


async def open_store(config: ServeConfig) -> Store:
    """Open the store that the settings name.

    Raises:
        ConfigError: the address is invalid.
        StoreError: the store cannot be reached, or could lose acknowledged writes.
    """
    scheme, _, rest = config.store.partition(":")
    if scheme == "sqlite":
        from .sqlite import SqliteStore

        return SqliteStore(rest, config.reserve_bytes)
    if scheme in ("postgresql", "postgres"):
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
    if scheme in ("redis", "rediss", "unix"):
        from .redis import RedisStore

        store = RedisStore(config.store, replicas=config.store_replicas)
        try:
            await store.check(allow_unsafe=config.allow_unsafe_redis)
        except BaseException:
            await store.close()
            raise
        return store
    raise ConfigError(
        "a store is sqlite:FOLDER, postgresql://HOST/DATABASE or redis://HOST:PORT/DB; "
        f"given: {without_passwords(config.store)!r}"
    )
