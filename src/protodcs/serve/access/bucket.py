"""A token bucket, for rates."""


class Bucket:
    """A token bucket: each request takes a token, and tokens come back at a steady rate.

    >>> bucket = Bucket(rate=10, burst=1)
    >>> bucket.take(now=0.0), bucket.take(now=0.0)
    (0.0, 0.1)
    """

    def __init__(self, rate: float, burst: float):
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._filled: float | None = None

    def take(self, now: float) -> float:
        """Take a token and return 0. If there is none, return the seconds until there is one."""
        passed = 0.0 if self._filled is None else max(0.0, now - self._filled)
        self._tokens = min(self._burst, self._tokens + passed * self._rate)
        self._filled = now
        if self._tokens < 1:
            return (1 - self._tokens) / self._rate
        self._tokens -= 1
        return 0.0
