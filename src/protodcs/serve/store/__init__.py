"""Where streams are stored: SQLite for one process, Redis for many; `open_store` chooses by the address."""

from ...errors import ConfigError, without_passwords
from ..settings import ServeConfig
from .base import Store

__all__ = ["Store", "open_store"]


async def open_store(config: ServeConfig) -> Store:
    """Open the store that the settings name.

    Raises:
        ConfigError: the address is invalid.
        StoreError: the store cannot be reached, or Redis could lose acknowledged writes.
    """
    scheme, _, rest = config.store.partition(":")
    if scheme == "sqlite":
        from .sqlite import SqliteStore

        return SqliteStore(rest)
    if scheme in ("redis", "rediss", "unix"):
        from .redis import RedisStore

        store = RedisStore(config.store, replicas=config.store_replicas)
        try:
            await store.check(allow_unsafe=config.allow_unsafe_redis)
        except BaseException:
            await store.close()
            raise
        return store
    raise ConfigError(f"a store is sqlite:FOLDER or redis://HOST:PORT/DB; given: {without_passwords(config.store)!r}")
