"""Times of records are read in one way, whatever zone and form they are written in."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.platform.times import UNKNOWN_S, minute, moment, moment_of, now

ZONES = st.integers(-23 * 60, 23 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))


def test_a_date_without_a_zone_is_of_utc() -> None:
    assert moment("2026-01-02T03:04:05") == moment("2026-01-02T03:04:05+0000")
    assert moment(" 2026-01-02 03:04:05Z ") == moment("2026-01-02T04:04:05+01:00")
    assert minute(moment("2026-01-02T01:30:00-02:00")) == "2026-01-02 03:30"


def test_what_is_written_is_read() -> None:
    assert abs(moment(now()) - datetime.now(UTC).timestamp()) < 100


@pytest.mark.parametrize("value", [None, "", "yesterday", 5.0, [], "2026-13-01"])
def test_what_is_no_date_comes_before_all_dates(value: object) -> None:
    assert moment_of(value) == UNKNOWN_S < moment("0001-01-01T00:00:00+23:00")
    assert minute(moment_of(value)) == ""


SECONDS = st.datetimes().map(lambda moment: moment.replace(microsecond=0))


@given(SECONDS, SECONDS, ZONES, ZONES)
def test_moments_are_ordered_as_they_passed(
    one: datetime, other: datetime, zone: timezone, elsewhere: timezone
) -> None:
    first, second = one.replace(tzinfo=zone), other.replace(tzinfo=elsewhere)
    earlier = moment_of(first.isoformat()) < moment_of(second.isoformat())
    assert earlier == ((first - second) < timedelta(0))
