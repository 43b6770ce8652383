"""When a word about a state that lasts is due."""

from __future__ import annotations

from safelaunch.supervise.reminders import Reminder


def test_reminder_is_due_at_doubling_intervals() -> None:
    reminder = Reminder()
    said = [(now, reminder.is_first) for now in range(100, 300) if reminder.is_due(100.0, 10.0, float(now))]
    assert said == [(110, True), (120, False), (140, False), (180, False), (260, False)]


def test_reminder_restarts_for_a_new_state() -> None:
    reminder = Reminder()
    assert reminder.is_due(100.0, 10.0, 110.0)
    assert not reminder.is_due(None, 10.0, 111.0)
    assert not reminder.is_due(112.0, 10.0, 113.0)
    assert reminder.is_due(112.0, 10.0, 122.0) and reminder.is_first
