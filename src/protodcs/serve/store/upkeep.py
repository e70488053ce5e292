"""When a files store waits for its disk, and how it frees room: needless files, and segments of the log.

A file is removed, and a segment deleted, only when the disk holds what made it needless; what is still needed of a
segment is copied forward and on the disk before.
"""

import time
from contextlib import suppress
from pathlib import Path

from ...errors import StoreError
from .catalogue import Catalogue
from .log import Log

# A sealed segment of which less than this is needed is copied forward: the copy costs a third of the room it frees.
_MOSTLY_DEAD = 0.25


class Upkeep:
    """What a store does beside what it is asked for.

    Args:
        log, catalogue: what there is to look after.
        sync, interval: when the log is synced.
        most_needless: bytes of needless files from which on they are not waited for.

    Attributes:
        needless: files, with their bytes, to remove once the disk holds the log.
        unused: shared blobs to remove then, unless a stream uses them again.
    """

    def __init__(self, log: Log, catalogue: Catalogue, sync: str, interval: float, most_needless: int):
        self._log = log
        self._catalogue = catalogue
        self._policy = sync
        self._interval = interval
        self._most_needless = most_needless
        self.needless: dict[Path, int] = {}
        self.unused: set[str] = set()
        self._synced_at = time.monotonic()
        # Segments that could not be copied forward; they are tried again when the log begins another one.
        self._stuck: set[int] = set()
        self._tidied = log.end[0]

    # Syncing.

    def until_sync(self) -> float | None:
        """In how many seconds the log has to be synced; None if no time is set for it."""
        if self._policy != "interval" or not self._log.unsynced or self._log.broken is not None:
            return None
        return max(0.0, self._synced_at + self._interval - time.monotonic())

    def sync_if_due(self) -> None:
        """Sync if it is time for it."""
        # Replaced snapshots must not pile up where nobody syncs.
        full = sum(self.needless.values()) > self._most_needless
        if (self.until_sync() == 0.0 or full) and self._log.broken is None:
            with suppress(StoreError):  # The log is broken then, and says so to the next one who writes.
                self.sync()

    def sync_written(self) -> None:
        """Sync what was just written, if nobody may be told of it before."""
        if self._policy == "always":
            self.sync_rest()

    def sync_rest(self) -> None:
        """Sync what was written and not synced."""
        if self._log.unsynced:
            self.sync()

    def sync(self) -> None:
        """Wait for the disk, and remove the files that nothing names any more; one may stay until the next opening."""
        self._log.sync()
        self._synced_at = time.monotonic()
        needless, self.needless = self.needless, {}
        unused, self.unused = self.unused, set()
        blobs = (self._catalogue.shared_path(name) for name in unused if not self._catalogue.users[name])
        for path in (*needless, *blobs):
            with suppress(OSError):
                path.unlink()

    # Segments.

    def tidy(self) -> None:
        """Delete segments that are not needed, and free those of which little is."""
        if self._log.end[0] != self._tidied:
            self._tidied = self._log.end[0]
            self._stuck.clear()
        with suppress(StoreError):  # Nobody asked for this; if the log is broken, the next one who writes hears of it.
            for segment in self._log.sealed():
                if segment == self._log.oldest():
                    self._open_graves(segment)
                share = self._log.live_share(segment)
                if share == 0:
                    self._remove(segment)
                elif share < _MOSTLY_DEAD and segment not in self._stuck:
                    self._copy_forward(segment)

    def _open_graves(self, oldest: int) -> None:
        """No segment is left that could bring back the streams whose deletion stands in the oldest one."""
        for place in self._catalogue.graves.pop(oldest, {}).values():
            self._log.let_go(place)

    def _remove(self, segment: int) -> None:
        self.sync_rest()
        self._log.remove(segment)

    def _copy_forward(self, segment: int) -> None:
        """Free a segment of which little is needed. A crash may leave a frame twice; the later one counts."""
        self._stuck.add(segment)
        moves = self._catalogue.moves_from(segment)
        try:
            places = [self._log.add(self._log.read(place)) for place, _ in moves]
            self._log.write()
        except BaseException:
            self._log.rewind(0)
            raise
        self.sync()
        self._catalogue.graves.pop(segment, None)
        for (old, move), new in zip(moves, places, strict=True):
            self._log.let_go(old)
            self._log.hold(new)
            move(new)
        self._remove(segment)
