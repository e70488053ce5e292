"""A store in memory that several owners of one process share, with faults that a test asks for.

It keeps the rules of `protodcs.serve.store.base` in the plainest way, and is itself held against the contract tests.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from protodcs.errors import FencedError, HeldError, StoreError, UnknownStreamError
from protodcs.serve.store.base import Batch, Described, Held, Write


@dataclass
class _Stream:
    birth: bytes
    shared: str
    epoch: int = 0
    holder: tuple[str, str] | None = None
    snapshot: bytes | None = None
    start: int = 0
    journal: list[bytes] = field(default_factory=list)
    kept: dict[str, bytes] = field(default_factory=dict)


class MemoryStore:
    several_owners = True

    def __init__(self) -> None:
        self.content: dict[str, _Stream] = {}
        self.leases: dict[str, tuple[str, float]] = {}
        self.shared: dict[str, bytes] = {}
        # A stream that is created again goes on from the epoch it had when it was deleted.
        self.past: dict[str, int] = {}
        self.down = False
        # Commits wait until it is set.
        self.gate: asyncio.Event | None = None
        # The next so many commits are done, and their answer is lost.
        self.lose_answers = 0
        self.commits = 0
        # Writes that do not fit their journal: an owner must never send one.
        self.misfits: list[Write] = []

    def _reach(self) -> None:
        if self.down:
            raise StoreError("the store is down")

    def _own(self, stream: str, epoch: int) -> _Stream:
        found = self.content.get(stream)
        if found is None or found.epoch != epoch:
            newest = "gone" if found is None else f"at epoch {found.epoch}"
            raise FencedError(f"a write of epoch {epoch} to the stream {stream!r}, which is {newest}")
        return found

    def _lives(self, holder: tuple[str, str]) -> bool:
        incarnation, until = self.leases.get(holder[0], ("", 0.0))
        return incarnation == holder[1] and time.monotonic() < until

    async def renew(self, owner: str, incarnation: str, seconds: float) -> None:
        self._reach()
        self.leases[owner] = (incarnation, time.monotonic() + seconds)

    async def resign(self, owner: str, incarnation: str) -> None:
        self._reach()
        if self.leases.get(owner, ("", 0.0))[0] == incarnation:
            del self.leases[owner]

    async def create(self, stream: str, birth: bytes, shared: str) -> bool:
        self._reach()
        if stream in self.content:
            return False
        if shared not in self.shared:
            raise StoreError(f"there is no shared blob {shared!r}")
        self.content[stream] = _Stream(birth, shared, self.past.get(stream, 0))
        return True

    async def acquire(self, stream: str, owner: str, incarnation: str) -> Held:
        self._reach()
        found = self.content.get(stream)
        if found is None:
            raise UnknownStreamError(f"there is no stream {stream!r}")
        if found.holder is not None and found.holder[0] != owner and self._lives(found.holder):
            raise HeldError(f"{stream} is held by {found.holder[0]}", found.holder[0])
        found.epoch += 1
        found.holder = (owner, incarnation)
        return Held(found.epoch, found.birth, found.snapshot, found.start, list(found.journal))

    async def commit(self, writes: Sequence[Write]) -> list[FencedError | None]:
        if self.gate is not None:
            await self.gate.wait()
        self._reach()
        self.commits += 1
        outcomes = [self._write(write) for write in writes]
        if self.lose_answers:
            self.lose_answers -= 1
            raise StoreError("the answer was lost")
        return outcomes

    def _write(self, write: Write) -> FencedError | None:
        try:
            found = self._own(write.stream, write.epoch)
        except FencedError as problem:
            return problem
        end = found.start + len(found.journal)
        if isinstance(write, Batch):
            if write.position + len(write.records) <= end:
                return None
            if write.position != end:
                self._refuse(write, end)
            found.journal += write.records
        elif write.position > end:
            self._refuse(write, end)
        elif write.position >= found.start:
            found.snapshot = write.snapshot
            del found.journal[: write.position - found.start]
            found.start = write.position
        return None

    def _refuse(self, write: Write, end: int) -> None:
        self.misfits.append(write)
        raise StoreError(f"{write.stream!r}: a write at position {write.position}, and the journal ends at {end}")

    async def release(self, stream: str, epoch: int) -> None:
        self._reach()
        found = self.content.get(stream)
        if found is not None and found.epoch == epoch:
            found.holder = None

    async def delete(self, stream: str, epoch: int) -> None:
        self._reach()
        gone = self._own(stream, epoch)
        del self.content[stream]
        self.past[stream] = epoch
        if all(other.shared != gone.shared for other in self.content.values()):
            del self.shared[gone.shared]

    async def describe(self, stream: str) -> Described:
        self._reach()
        found = self.content.get(stream)
        if found is None:
            raise UnknownStreamError(f"there is no stream {stream!r}")
        size = sum(map(len, [found.birth, found.snapshot or b"", *found.journal, *found.kept.values()]))
        owner = found.holder[0] if found.holder is not None and self._lives(found.holder) else None
        return Described(found.birth, found.epoch, owner, found.start + len(found.journal), found.start, size)

    async def streams(self):
        self._reach()
        for stream in list(self.content):
            yield stream

    async def keep(self, stream: str, epoch: int, name: str, snapshot: bytes) -> None:
        self._reach()
        kept = self._own(stream, epoch).kept
        kept.pop(name, None)
        kept[name] = snapshot

    async def kept(self, stream: str) -> list[str]:
        self._reach()
        return list(self.content[stream].kept) if stream in self.content else []

    async def kept_snapshot(self, stream: str, name: str) -> bytes | None:
        self._reach()
        return self.content[stream].kept.get(name) if stream in self.content else None

    async def forget(self, stream: str, epoch: int, name: str) -> None:
        self._reach()
        self._own(stream, epoch).kept.pop(name, None)

    async def put_shared(self, name: str, data: bytes) -> None:
        self._reach()
        self.shared[name] = data

    async def get_shared(self, name: str) -> bytes:
        self._reach()
        if name not in self.shared:
            raise StoreError(f"there is no shared blob {name!r}")
        return self.shared[name]

    async def close(self) -> None:
        pass
