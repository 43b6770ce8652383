"""Several threads of a rank in collectives: whose call is whose, and two that race in one group."""

from __future__ import annotations

from typing import Any

import msgspec

from safelaunch.capture.flight_dump import parse_json, to_json
from safelaunch.model import Collective, Frame
from tests.support.evidence import C10D, LOGGER, MODULE, at, record

MAIN, OTHER = 7001, 7002


def made(text: str, *, frames: bool = True) -> tuple[Collective, ...]:
    """``"a50 b9*"``: the main thread called at line 50, the other one at line 9 and has not completed it."""
    found = []
    for number, word in enumerate(text.split(), 1):
        thread, line = (MAIN if word[0] == "a" else OTHER), int(word[1:].rstrip("*"))
        outer = MODULE if thread == MAIN else at(100, "publish_metrics")
        stack = (Frame(C10D, 3245, "all_reduce"), Frame(LOGGER, 83, "wrapper"), at(line), outer)
        one = Collective("0", number, "gloo:all_reduce", completed=not word.endswith("*"), state="scheduled")
        more: dict[str, Any] = {"record_id": number, "input_sizes": ((line,),), "input_dtypes": ("Float",)}
        found.append(msgspec.structs.replace(one, frames=stack if frames else (), thread=thread, **more))
    return tuple(found)


def test_flight_record_threads_survive_a_json_dump() -> None:
    one = record(*made("a50 b9 a50*"))
    assert [entry.thread for entry in parse_json(to_json(one)).entries] == [MAIN, OTHER, MAIN]
    damaged = parse_json(to_json(one).replace(b'"7001"', b'"x"'))
    assert damaged.damaged == ("thread_id",)
    assert [entry.thread for entry in damaged.entries] == [0, OTHER, 0]
