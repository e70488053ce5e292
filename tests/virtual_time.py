"""An event loop whose clock jumps to the next timer, so that tests neither wait nor depend on a loaded machine."""

import asyncio
import selectors
import time


class VirtualClock:
    """A clock that stands still until an event loop has nothing to do but wait.

    Attributes:
        now: virtual seconds; starts at the time of the real monotonic clock.
    """

    def __init__(self) -> None:
        self.now = time.monotonic()

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self.now

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """Return an event loop that lives in this virtual time."""
        return _VirtualTimeLoop(self)


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[valid-type, misc]
    """A selector that advances the clock instead of waiting."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock
        self.running_threads = 0

    def select(self, timeout=None):
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        if self.running_threads:
            # A thread works in real time: no timer may overtake it, however slow the machine is.
            return super().select(None)
        ready = super().select(0)
        if not ready:
            self._clock.now += timeout
        return ready


class _VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._jumping = _JumpingSelector(clock)
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._clock.now

    def run_in_executor(self, executor, func, *args):
        future = super().run_in_executor(executor, func, *args)
        self._jumping.running_threads += 1
        future.add_done_callback(self._thread_done)
        return future

    async def shutdown_default_executor(self, *args, **kwargs):
        self._jumping.running_threads += 1
        try:
            await super().shutdown_default_executor(*args, **kwargs)
        finally:
            self._jumping.running_threads -= 1

    def _thread_done(self, _future) -> None:
        self._jumping.running_threads -= 1
