"""What takes longer than in an earlier recording."""

from __future__ import annotations

from recordings import ALL_REDUCE, AUGMENT, BACKWARD, FORWARD, recording

from safelaunch.report.slowness import compare

BEFORE = recording(*[{FORWARD: 0.5, BACKWARD: 0.5}] * 2, steps=100)  # 0.1 s each


def test_what_grew_is_told_by_the_seconds_of_a_step() -> None:
    # 0.2 s a step: forward and backward take as long as before, though their shares are half of what they were.
    now = recording(*[{FORWARD: 0.25, BACKWARD: 0.25, AUGMENT: 0.5}] * 2, steps=50)
    found = compare(BEFORE, now)
    assert [(one.place.function, round(one.more, 3)) for one in found.changes] == [("augment", 0.1)]
    assert found.text == (
        "A step takes 200.0 ms (was 100.0 ms); what grew most: script at data.py:12 (augment), 100.0 ms more."
    )


def test_where_a_rank_is_late_its_own_lines_are_compared() -> None:
    """Else each of the others would wait longer by as much, and they are more."""
    late = {FORWARD: 0.25, BACKWARD: 0.25, AUGMENT: 0.5}
    others = {FORWARD: 0.25, BACKWARD: 0.25, ALL_REDUCE: 0.5}
    now = recording(others, late, others, others, steps=50)
    before = recording(*[{FORWARD: 0.5, BACKWARD: 0.5}] * 4, steps=100)
    found = compare(before, now)
    assert found.text.endswith("what grew most on rank 1: script at data.py:12 (augment), 100.0 ms more.")
    assert [one.place.function for one in found.changes] == ["augment"]


def test_without_steps_shares_are_compared() -> None:
    found = compare(recording({FORWARD: 1.0}), recording({FORWARD: 0.6, AUGMENT: 0.4}))
    assert [(one.place.function, round(one.more, 2)) for one in found.changes] == [("augment", 0.4), ("<module>", -0.4)]
    assert "script at data.py:12 (augment), 40% more" in found.text


def test_the_same_again_has_not_grown() -> None:
    assert compare(BEFORE, BEFORE).changes == ()
    assert compare(BEFORE, BEFORE).text.endswith("no line takes noticeably longer.")
