"""When: daily, weekly, an interval such as 30m, or a cron expression; and the same for other schedulers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from labkit.errors import InputError, refuse, require

NAMED = {"hourly": "0 * * * *", "daily": "0 3 * * *", "weekly": "0 3 * * 1"}
"""At 03:00, when nobody waits for the machine; weekly on Mondays."""

_INTERVAL = re.compile(r"(\d{1,6})\s*([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_EXPECTED = 'hourly, daily, weekly, or a cron expression of five fields such as "0 3 * * *"'
_DAYS = ("Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat")


@dataclass(frozen=True)
class Every:
    """A point in time again and again: by a cron expression, or, with ``seconds``, by an interval."""

    cron: str = ""
    seconds: int = 0

    def after(self, moment: datetime) -> datetime:
        """The first time after ``moment`` (local time with its zone)."""
        if self.seconds:
            return moment + timedelta(seconds=self.seconds)
        from cronsim import CronSim

        return next(CronSim(self.cron, moment))


def parse(text: str, *, intervals: bool = True) -> Every:
    """Read ``--every``.

    Args:
        intervals: allow 30s, 15m, 2h and 1d, which a machine's scheduler does not have.

    Raises:
        InputError: neither of these; says which field of a cron expression is bad.
    """
    words = " ".join(text.split())
    if found := _INTERVAL.fullmatch(words):
        seconds = int(found[1]) * _SECONDS[found[2]]
        require(intervals, "--every", repr(text), _EXPECTED)
        require(0 < seconds <= 31 * 86400, "--every", repr(text), "an interval from 1s to 31d")
        return Every(seconds=seconds)
    cron = NAMED.get(words.lower(), words.upper())
    if len(cron.split()) != 5:
        more = "an interval such as 30m or 12h, " if intervals else ""
        refuse("--every", repr(text), more + _EXPECTED)
    _expression(cron, text)
    return Every(cron=cron)


def _expression(cron: str, text: str) -> Any:
    from cronsim import CronSim, CronSimError

    # L and #, which only some crons have; a name such as JUL has an L as well
    odd = "#" in cron or any(re.search(r"(^|[\d,])LW?($|,)", part) for part in cron.split())
    require(not odd, "--every", repr(text), "fields of digits, names, *, commas, - and /")
    try:
        sim = CronSim(cron, datetime.now())
        next(sim)
    except (CronSimError, StopIteration) as error:
        words = f"{text!r} ({error or 'it never comes'})"
        raise InputError("--every", words, _EXPECTED) from error
    return sim


@dataclass(frozen=True)
class _Fields:
    minutes: list[int]
    hours: list[int]
    days: list[int]
    months: list[int]
    weekdays: list[int]
    any_day: bool
    any_weekday: bool


def _fields(every: Every) -> _Fields:
    sim = _expression(every.cron, every.cron)
    parts = every.cron.split()
    weekdays = sorted({day % 7 for day in sim.weekdays})
    lists = (sorted(sim.minutes), sorted(sim.hours), sorted(sim.days), sorted(sim.months), weekdays)
    return _Fields(*lists, parts[2].startswith("*"), parts[4].startswith("*"))


def calendars(every: Every) -> list[str]:
    """systemd's ``OnCalendar`` expressions; cron's "or" of two kinds of days takes two of them."""
    f = _fields(every)

    def listed(values: list[int], whole: int, width: int = 2) -> str:
        return "*" if len(values) == whole else ",".join(f"{value:0{width}d}" for value in values)

    time = f"{listed(f.hours, 24)}:{listed(f.minutes, 60)}:00"
    months = listed(f.months, 12)
    week = "" if len(f.weekdays) == 7 else ",".join(_DAYS[day] for day in f.weekdays) + " "
    days = listed(f.days, 31)
    if f.any_day or f.any_weekday:
        return [f"{week}*-{months}-{days} {time}"]
    return [f"*-{months}-{days} {time}", f"{week}*-{months}-* {time}"]


def schtasks(every: Every) -> list[str]:
    """Options of Windows' schtasks.

    Raises:
        InputError: a rhythm that schtasks has no options for.
    """
    f = _fields(every)
    can = "an hour and minute each day, on week days, or on a day of the month; or every N minutes or hours"
    all_days = len(f.days) == 31 and len(f.months) == 12 and len(f.weekdays) == 7
    if len(f.hours) == 24 and all_days:
        if len(f.minutes) == 1:
            return ["/SC", "HOURLY", "/ST", f"00:{f.minutes[0]:02d}"]
        step = f.minutes[1] - f.minutes[0]
        if f.minutes == list(range(0, 60, step)) and 60 % step == 0:
            return ["/SC", "MINUTE", "/MO", str(step), "/ST", "00:00"]
    require(len(f.minutes) == len(f.hours) == 1, "--every", repr(every.cron), can)
    at = ["/ST", f"{f.hours[0]:02d}:{f.minutes[0]:02d}"]
    if all_days:
        return ["/SC", "DAILY", *at]
    require(len(f.months) == 12, "--every", repr(every.cron), can)
    if len(f.days) == 31:
        return ["/SC", "WEEKLY", "/D", ",".join(_DAYS[day].upper() for day in f.weekdays), *at]
    require(len(f.days) == 1 and len(f.weekdays) == 7, "--every", repr(every.cron), can)
    return ["/SC", "MONTHLY", "/D", str(f.days[0]), *at]
