"""Change streams in memory, and put what changed into the queue of the journal."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from zlib import crc32

from ...errors import StoreError
from ..log.entries import LogEntry, Range
from ..log.notices import Notice
from ..messages import Reply, Request
from ..pipeline.commit import GroupCommit
from ..settings import ServeConfig
from ..store.values import Batch
from ..stream.idempotency import digest_of
from ..stream.records import Kind, Record
from .checkpoints import Checkpoints
from .computing import Computing
from .lease import WorkerLease
from .loaded_stream import LoadedStream
from .quotas import Quotas
from .replies import PreconditionError, done_reply

# Changes that may take seconds, so that they run in a thread.
_LONG = (Kind.RESTORE, Kind.EDIT_CLUSTERS)


class Changes:
    """Applies changes, and writes their records and snapshots.

    Args:
        commits: the queue of records.
        checkpoints: the queue of snapshots.
        quotas: where written bytes are counted.
        computing: where changes are computed.
        lease: knows the time.
        config: the settings of the service.

    Attributes:
        on_commit: called as soon as records are durable: with their stream, the position of the first one, and whether
            there are notices.
    """

    def __init__(
        self,
        commits: GroupCommit,
        checkpoints: Checkpoints,
        quotas: Quotas,
        computing: Computing,
        lease: WorkerLease,
        config: ServeConfig,
    ):
        self._commits = commits
        self._checkpoints = checkpoints
        self._quotas = quotas
        self._computing = computing
        self._lease = lease
        self._config = config
        self.on_commit: Callable[[str, int, bool], None] | None = None

    async def applied(self, loaded: LoadedStream, kind: Kind, request: Request) -> Reply | None:
        """Return the reply to a request that was applied before, as soon as it is durable."""
        async with loaded.in_use:
            found = loaded.live.applied(kind, request.key, content_digest(request))
        if found is None:
            return None
        await loaded.journal.wait_durable()
        return done_reply(found, repeated=True)

    async def apply(
        self, loaded: LoadedStream, kind: Kind, request: Request, payload: bytes, back_to: int | None = None
    ) -> Reply:
        """Apply one change and wait until it is durable. If a retry was faster, only wait.

        If the change restores an earlier state, `back_to` is the position that the state belongs to.
        """
        live, digest, long_journal = loaded.live, content_digest(request), False
        async with loaded.in_use:
            found = live.applied(kind, request.key, digest)
            if found is None:
                if request.if_match and live.etag not in request.if_match:
                    raise PreconditionError(f"The ETag of the state is {live.etag}. Read the state again.")
                change = partial(live.change, kind, request.key, payload, self._lease.now(), digest)
                with loaded.changing:
                    record = await self._computing.run(loaded, change, long=kind in _LONG)
                roll_backs = [] if back_to is None else [(back_to, record.position)]
                long_journal = self.put(request.stream, loaded, record.position, [record], roll_backs=roll_backs)
        await loaded.journal.wait_durable()
        if long_journal:
            # The record may be a whole state. Wait for the snapshot that removes it from the journal. If that one
            # cannot be written, the record is durable all the same.
            with suppress(StoreError):
                await loaded.journal.settle_snapshot()
        return done_reply(record) if found is None else done_reply(found, repeated=True)

    def put(
        self,
        stream: str,
        loaded: LoadedStream,
        position: int,
        records: list[Record],
        log: Sequence[LogEntry] = (),
        roll_backs: Sequence[Range] = (),
        notices: Sequence[Notice] = (),
    ) -> bool:
        """Queue records. If the journal has become long, also queue a snapshot and return True."""
        summary, fence = loaded.live.summary().pack(), loaded.live.fence
        packed = [record.pack() for record in records]
        positions = [len(record.answers) for record in records]
        batch = Batch(stream, fence, position, packed, summary, log, roll_backs, notices, positions)
        written = None if self.on_commit is None else partial(self.on_commit, stream, position, bool(notices))
        self._commits.put(loaded.journal, batch, written)
        loaded.journal_bytes += batch.size
        self._quotas.add(stream, batch.size)
        config = self._config
        long = loaded.unsnapshotted_records >= _longest_journal(stream, config.snapshot_records)
        if not long and loaded.journal_bytes < config.snapshot_bytes:
            return False
        self._checkpoints.put(stream, loaded)
        return True


@lru_cache(maxsize=10_000)
def _longest_journal(stream: str, records: int) -> int:
    """Return after how many records a snapshot of a stream is due: up to a quarter fewer than `records`.

    Streams that began together and have the same rate must not all write their snapshots at the same moment.
    """
    return records - crc32(stream.encode("utf-8", "surrogatepass")) % max(records // 4, 1)


def content_digest(request: Request) -> bytes:
    """Return the digest of the content of a request, which a retry must repeat."""
    return request.digest or digest_of(request.action.encode(), request.payload)
