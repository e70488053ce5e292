"""Months of the decision log. A month is a number such as 203001, in UTC."""

from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final

_DAY: Final = 86_400_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def month_of(milliseconds: int) -> int:
    """Return the month of a time in milliseconds since 1970.

    >>> month_of(0), month_of(1_900_000_000_000)
    (197001, 203003)
    """
    return _month_of_day(milliseconds // _DAY)


@lru_cache(maxsize=1000)
def _month_of_day(day: int) -> int:
    moment = _EPOCH + timedelta(days=day)
    return 100 * moment.year + moment.month


def range_of(month: int) -> tuple[int, int]:
    """Return when a month begins and ends, in milliseconds since 1970.

    >>> range_of(197001)
    (0, 2678400000)
    """
    year, number = divmod(month, 100)
    begin = datetime(year, number, 1, tzinfo=UTC)
    end = datetime(year + number // 12, number % 12 + 1, 1, tzinfo=UTC)
    return _milliseconds(begin), _milliseconds(end)


def _milliseconds(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(milliseconds=1)
