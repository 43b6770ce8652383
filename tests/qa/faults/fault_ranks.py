"""Faults that a rank causes itself, and faults of its progress page."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from tests.qa.faults.row import NAMED, TRAINS, Promise, Row
from tests.qa.faults.scene import TRAINING, Kind, Scene, at_training, goes_on

PAGE_BYTES = 4096


def _odd(what: str, when: str) -> Kind:
    return replace(TRAINING, script=(f"--odd={what}", f"--when={when}"))


def _has_acted(scene: Scene) -> None:
    scene.until(lambda: (scene.scratch / "odd-1").exists(), "the rank's action")


def and_goes_on(scene: Scene) -> None:
    _has_acted(scene)
    goes_on(scene)


def and_hangs(scene: Scene) -> None:
    _has_acted(scene)
    at_training(scene)
    scene.steer("hang")


def _oddities() -> list[Row]:
    any_time = ("ignores SIGTERM", "chdirs", "changes its title", "unsets its environment")
    at_start = ("forks and exits", "closes descriptors")
    rows = [
        Row(f"rank {what}", "start-up", TRAINS, and_goes_on, _odd(what, "start-up")) for what in (*any_time, *at_start)
    ]
    cases = [*((what, "training") for what in any_time), *((what, "start-up") for what in at_start)]
    rows += [Row(f"rank {what}, then hangs", when, NAMED, and_hangs, _odd(what, when)) for what, when in cases]
    # Its connections are closed or no longer served: the job itself crashes or hangs.
    rows += [
        Row(
            "rank forks and exits",
            "training",
            Promise((1, 124), (1, 1), (1,)),
            kind=_odd("forks and exits", "training"),
        ),
        Row(
            "rank closes descriptors",
            "training",
            Promise((1, 124), (1, 1)),
            kind=_odd("closes descriptors", "training"),
        ),
    ]
    return rows


# --- its progress page ------------------------------------------------------------------------------------------------

DAMAGE = {
    "zeros": bytes(PAGE_BYTES),
    "ones": b"\xff" * PAGE_BYTES,
    "noise": random.Random(4).randbytes(PAGE_BYTES),
}


def damage(data: bytes, then: Callable[[Scene], None] = goes_on) -> Callable[[Scene], None]:
    """Overwrites the whole page of the last rank, like a stray write of that rank."""

    def inject(scene: Scene) -> None:
        scene.until(lambda: len(scene.pages()) == scene.kind.ranks, "the pages of all ranks")
        page = next(path for path in scene.pages() if path.name.split("-")[1] == "1")
        with page.open("r+b") as file:
            file.write(data)
        then(scene)

    return inject


def hang(scene: Scene) -> None:
    scene.steer("hang")


def nothing_more(_: Scene) -> None:
    return


def _pages() -> list[Row]:
    rows = []
    for name, data in DAMAGE.items():
        fault = f"progress page corrupted ({name})"
        rows += [
            Row(fault, "training", TRAINS, damage(data)),
            Row(f"{fault}, then a hang", "training", NAMED, damage(data, hang)),
        ]
    fault, data = "progress page corrupted (noise)", DAMAGE["noise"]
    rows.append(Row(fault, "ranks' start", TRAINS, damage(data)))
    return rows + [Row(fault, at, NAMED, damage(data, nothing_more)) for at in ("suspicion", "capture")]


ROWS = [*_oddities(), *_pages()]
