"""The time of the garbage collector, measured between two requests: ``beacon/garbage.py``."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from typing import Any

import pytest

from safelaunch.beacon import garbage


class Response:
    content: dict[str, float]

    def set_content(self, content: bytes, kind: str) -> None:
        self.content = json.loads(content)

    def set_status(self, status: int) -> None:
        assert status == 200


@pytest.fixture(autouse=True)
def callbacks() -> Iterator[list[Any]]:
    before = [*gc.callbacks]
    yield before
    gc.callbacks[:] = before
    garbage._meters.clear()


def ask() -> dict[str, float]:
    response = Response()
    garbage.answer(None, response)
    return response.content


def test_collections_between_two_requests_are_measured(callbacks: list[Any]) -> None:
    assert ask() == {}
    junk = [[number] for number in range(100_000)]
    gc.collect()
    measured = ask()["collecting_s"]
    assert measured > 0 and gc.callbacks == callbacks and junk
    gc.collect()
    assert ask() == {}  # the next measurement


def test_measurement_without_an_end_ends_by_itself(callbacks: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "LONGEST_S", -1.0)
    ask()
    assert gc.callbacks != callbacks
    gc.collect()
    assert gc.callbacks == callbacks
    assert ask() == {} and gc.callbacks != callbacks  # the next measurement


def test_callbacks_changed_by_the_users_code_are_unknown_time_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Strange:
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            raise RuntimeError

        def __call__(self, phase: str, info: dict[str, int]) -> None:
            pass

    ask()
    gc.callbacks.insert(0, Strange())
    assert "collecting_s" in ask()
    ask()
    gc.callbacks.clear()
    assert ask() == {}
    monkeypatch.setattr(gc, "callbacks", None)
    assert (ask(), ask()) == ({}, {})
