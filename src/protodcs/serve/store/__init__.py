"""Where streams are kept: plain files for one process, Redis for many; `open_store` chooses by the address."""

from ...errors import ConfigError
from ..settings import ServeConfig
from .base import Store

__all__ = ["Store", "open_store"]


async def open_store(config: ServeConfig) -> Store:
    """The store that the settings name, proven to be there and to keep what it is given."""
    scheme, _, rest = config.store.partition(":")
    if scheme == "files":
        from .files import FileStore

        return FileStore(rest, sync=config.sync, interval=config.sync_seconds)
    if scheme in ("redis", "rediss", "unix"):
        from .redis import RedisStore

        store = RedisStore(config.store)
        if not config.trust_store:
            await store.check()
        return store
    raise ConfigError(f"a store is files:FOLDER or redis://HOST:PORT/DB; given: {config.store!r}")
