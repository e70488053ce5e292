"""What every store must do, whatever it is made of: the table of stores, and the plain model they are held against.

A new store is one line in `STORES`: a name, and how to open it on a folder. Opened again on the same folder, it must
hold what it held before.
"""

import asyncio
import hashlib
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from memory_store import MemoryStore, stored_ids, stored_stream
from protodcs.errors import FencedError, UnknownStreamError
from protodcs.serve.settings import tenant_of
from protodcs.serve.store.base import Store
from protodcs.serve.store.postgres import PostgresStore
from protodcs.serve.store.sqlite import SqliteStore
from protodcs.serve.store.values import Batch, Checkpoint, Fence
from service.postgres import shared_postgres

BLOB = "prototypes-of-a-test"
# For folders of stores that no power cut meets: a disk that waits would take most of the time.
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


async def postgres_store(folder: Path) -> Store:
    """Open a PostgreSQL store in a schema of its own for each folder."""
    url = shared_postgres().schema(hashlib.sha256(str(folder).encode()).hexdigest()[:16])
    # A loaded machine may take long.
    return await PostgresStore(url, timeout=60.0).prepare()


async def sqlite_store(folder: Path) -> Store:
    """Open a SQLite store in a folder."""
    return SqliteStore(folder / "store")


@cache
def memory_of(folder: Path) -> MemoryStore:
    return MemoryStore()


async def memory_store(folder: Path) -> Store:
    """A store in memory for each folder."""
    return memory_of(folder)


STORES: dict[str, Callable[[Path], Awaitable[Store]]] = {
    "postgres": postgres_store,
    "sqlite": sqlite_store,
    "memory": memory_store,
}


# Stores that several workers share.
SHARED_STORES = [name for name in STORES if name != "sqlite"]


def of_stores(*names: str) -> pytest.MarkDecorator:
    """Mark a test that gets an empty store, `store`, for each of these names."""
    return pytest.mark.parametrize("store", names, indirect=True)


of_every_store = of_stores(*STORES)
of_shared_stores = of_stores(*SHARED_STORES)


@asynccontextmanager
async def opened(name: str, folder: Path) -> AsyncIterator[Store]:
    """An empty store with a lease of worker "one"."""
    store = await STORES[name](folder)
    try:
        await store.renew("one", "1", 600)
        await store.put_shared(BLOB, b"blob")
        yield store
    finally:
        await store.close()


async def begun(store: Store, stream: str = "s", spec: bytes = b"spec") -> Fence:
    """Create a stream that worker "one" holds, and return its fence."""
    assert await store.create(stream, spec, BLOB)
    return (await store.acquire(stream, "one", "1")).fence


def older(fence: Fence, by: int = 1) -> Fence:
    """Return the fence of an earlier epoch."""
    return Fence(fence.epoch - by, fence.token)


class _Stream:
    """What a stream should hold."""

    def __init__(self, spec: bytes):
        self.spec = spec
        self.snapshot: bytes | None = None
        self.keys: dict[int, bytes] = {}
        self.start = 0
        # At the position of each record, how many positions it covers, and the record.
        self.journal: dict[int, tuple[int, bytes]] = {}
        self.saved: dict[str, bytes] = {}
        self.fence = Fence(0)
        self.held = False

    @property
    def position(self) -> int:
        return self.start + sum(count for count, _ in self.journal.values())

    def do(self, write: Batch | Checkpoint) -> None:
        if isinstance(write, Batch):
            self.journal |= {at: (count, record) for at, count, record in write.rows()}
        else:
            self.journal = {at: row for at, row in self.journal.items() if at >= write.position}
            self.start, self.snapshot = write.position, write.snapshot
            first, last = write.kept_keys
            self.keys = {at: data for at, data in self.keys.items() if first <= at <= last}
            if write.keys:
                self.keys[write.position] = write.keys


IDS = st.sampled_from(["a", "b:c", "\n\ud83d\ude00", "tenant/a", "tenant/b"])
BYTES = st.binary(max_size=40)
NAMES = st.sampled_from(["x", "y", ""])


def any_held(machine: "StoreMachine") -> bool:
    return any(known.held for known in machine.model.values())


class StoreMachine(RuleBasedStateMachine):
    """Does anything to a store, in any order, and holds it against dictionaries; a child names the store."""

    name: str

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir=MEMORY)
        self.loop = asyncio.new_event_loop()
        self.now = self.loop.run_until_complete
        self.model: dict[str, _Stream] = {}
        self.last: tuple[list[Batch | Checkpoint], list[bool]] = [], []
        self.open()

    def open(self) -> None:
        self.store = self.now(STORES[self.name](Path(self.folder.name)))
        self.now(self.store.renew("one", "1", 600))

    def teardown(self) -> None:
        self.now(self.store.close())
        self.loop.close()
        self.folder.cleanup()

    @rule(stream=IDS, spec=BYTES)
    def create(self, stream: str, spec: bytes) -> None:
        self.now(self.store.put_shared(BLOB, b"blob"))
        assert self.now(self.store.create(stream, spec, BLOB)) == (stream not in self.model)
        if stream not in self.model:
            self.model[stream] = _Stream(spec)
            # A stream may begin with any epoch that was not there before.
            self.model[stream].fence = Fence(self.now(stored_stream(self.store, stream)).epoch)

    @rule(stream=IDS)
    def acquire(self, stream: str) -> None:
        if stream not in self.model:
            with pytest.raises(UnknownStreamError):
                self.now(self.store.acquire(stream, "one", "1"))
            return
        known = self.model[stream]
        held = self.now(self.store.acquire(stream, "one", "1"))
        assert held.epoch > known.fence.epoch
        assert (held.spec, held.snapshot, held.start) == (known.spec, known.snapshot, known.start)
        assert held.tail == [record for _, record in known.journal.values()]
        assert held.position == known.position
        assert list(held.keys) == sorted(known.keys.items())
        known.fence, known.held = held.fence, True
        self.last = [], []

    @precondition(any_held)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """A few writes in one commit: new ones, repeated ones and stale ones, to any streams."""
        writes, stale = [], []
        for _ in range(data.draw(st.integers(0, 5), label="writes")):
            stream = data.draw(self._held())
            known = self.model[stream]
            stale.append(data.draw(st.booleans(), label="stale"))
            fence = older(known.fence, stale[-1])
            if data.draw(st.booleans(), label="checkpoint"):
                position = data.draw(st.sampled_from([*known.journal, known.position]), label="position")
                keys = data.draw(BYTES, label="keys")
                kept = data.draw(st.integers(0, position)), data.draw(st.integers(-1, position - 1))
                writes.append(Checkpoint(stream, fence, position, data.draw(BYTES), keys, kept))
            else:
                records = data.draw(st.lists(BYTES, min_size=1, max_size=4))
                positions = [data.draw(st.integers(1, 3)) for _ in records] if data.draw(st.booleans()) else ()
                writes.append(Batch(stream, fence, known.position, records, positions=positions))
            if not stale[-1]:
                known.do(writes[-1])
        self.last = writes, stale
        self.commit_the_last_again()

    @rule()
    def commit_the_last_again(self) -> None:
        """As after a lost answer: done once, and answered as the first time."""
        writes, stale = self.last
        refused = self.now(self.store.commit(writes))
        assert [isinstance(answer, FencedError) for answer in refused] == stale
        assert [answer is None for answer in refused] == [not old for old in stale]

    def _held(self) -> st.SearchStrategy[str]:
        return st.sampled_from(sorted(stream for stream, known in self.model.items() if known.held))

    @precondition(any_held)
    @rule(data=st.data(), name=NAMES, snapshot=BYTES, stale=st.booleans(), deletes=st.booleans())
    def keep_or_forget(self, data: st.DataObject, name: str, snapshot: bytes, stale: bool, deletes: bool) -> None:
        stream = data.draw(self._held())
        known = self.model[stream]
        fence = older(known.fence, stale)
        done = (
            self.store.delete_snapshot(stream, fence, name)
            if deletes
            else self.store.save_snapshot(stream, fence, name, snapshot)
        )
        if stale:
            with pytest.raises(FencedError):
                self.now(done)
            return
        self.now(done)
        known.saved.pop(name, None)
        if not deletes:
            known.saved[name] = snapshot

    @precondition(any_held)
    @rule(data=st.data(), stale=st.booleans())
    def delete(self, data: st.DataObject, stale: bool) -> None:
        stream = data.draw(self._held())
        if stale:
            with pytest.raises(FencedError):
                self.now(self.store.delete(stream, older(self.model[stream].fence)))
            return
        self.now(self.store.delete(stream, self.model.pop(stream).fence))
        self.last = [], []

    @precondition(any_held)
    @rule(data=st.data(), stale=st.booleans())
    def release(self, data: st.DataObject, stale: bool) -> None:
        stream = data.draw(self._held())
        before = self.now(stored_stream(self.store, stream))
        self.now(self.store.release(stream, older(self.model[stream].fence, stale)))
        after = self.now(stored_stream(self.store, stream))
        assert after.worker == (before.worker if stale else None)
        # Who released a stream may still write to it, until someone acquires it.

    @rule()
    def open_again(self) -> None:
        self.now(self.store.close())
        self.open()
        for stream, known in self.model.items():
            epoch = self.now(stored_stream(self.store, stream)).epoch
            assert epoch >= known.fence.epoch
            if epoch > known.fence.epoch:  # Who held it before is fenced.
                known.fence, known.held, self.last = Fence(epoch), False, ([], [])

    @invariant()
    def everything_is_as_it_should_be(self) -> None:
        assert self.now(stored_ids(self.store)) == sorted(self.model)
        for stream, known in self.model.items():
            found = self.now(stored_stream(self.store, stream))
            assert (found.spec, found.epoch) == (known.spec, known.fence.epoch)
            assert (found.start, found.position) == (known.start, known.position)
            assert self.now(self.store.saved_snapshots(stream)) == list(known.saved)
            for name, snapshot in known.saved.items():
                assert self.now(self.store.saved_snapshot(stream, name)) == snapshot
        self.check_usage()

    def check_usage(self) -> None:
        expected: Counter[str] = Counter()
        for stream, known in self.model.items():
            records = [record for _, record in known.journal.values()]
            parts = [known.spec, known.snapshot or b"", *known.keys.values(), *records, *known.saved.values()]
            expected[tenant_of(stream)] += sum(map(len, parts))
        for tenant in {tenant_of(stream) for stream in self.model}:
            expected[tenant] += len(b"blob")
        assert self.now(self.store.usage()) == expected
