"""Faults of py-spy: it is missing, not executable, hangs, lacks permission, or prints something else.

Each fault occurs from the start, or from the suspicion on. In the latter case, the first sample still succeeds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from tests.qa.faults.fault_processes import kill
from tests.qa.faults.row import DIES, NAMED, Row
from tests.qa.faults.scene import Scene, Setting
from tests.support.broken_py_spy import (
    bare_interpreter,
    denied,
    flooding,
    gibberish,
    hanging,
    killed_by_a_signal,
    missing,
    not_executable,
)


def _needs() -> str:
    if sys.prefix == sys.base_prefix:
        return "needs a virtual environment, to make another one like it"
    return "there is a py-spy in /usr/bin" if Path("/usr/bin/py-spy").exists() else ""


def _arranged(fault: Callable[[Path], None] | None) -> Callable[[Setting], AbstractContextManager[object]]:
    """Provides an interpreter whose py-spy is broken from the start, or works (None)."""

    @contextmanager
    def arrange(setting: Setting) -> Iterator[None]:
        beside = bare_interpreter(setting.scratch / "bare")
        if fault is None:
            (beside / "py-spy").symlink_to(Path(sys.prefix) / "bin" / "py-spy")
        else:
            fault(beside / "py-spy")
        setting.interpreter = (os.fspath(beside / "python"), "-m", "safelaunch")
        setting.env["PATH"] = "/usr/bin:/bin"
        yield

    return arrange


def _broken(fault: Callable[[Path], None]) -> Callable[[Scene], None]:
    def inject(scene: Scene) -> None:
        fault(scene.scratch / "bare" / "bin" / "py-spy")
        scene.steer("hang")  # if it has not begun

    return inject


FAULTS = {
    "missing": missing,
    "not executable": not_executable,
    "hanging": hanging,
    "denied": denied,
    "says gibberish": gibberish,
    "killed by a signal": killed_by_a_signal,
    "never stops talking": flooding,
}

LATER = ("missing", "hanging", "denied")
INSIDE = replace(NAMED, said=("py-spy can't read the stacks",))
ROWS = [
    *(
        Row(f"py-spy {name}", "suspicion", NAMED if name == "hanging" or name == "never stops talking" else INSIDE,
            arrange=_arranged(fault), needs=_needs)
        for name, fault in FAULTS.items()
    ),
    *(
        Row(f"py-spy {name} from now on", at, NAMED, _broken(fault), arrange=_arranged(None), needs=_needs)
        for at, names in (("training", ("missing",)), ("suspicion", LATER), ("capture", ("missing",)))
        for name, fault in FAULTS.items()
        if name in names
    ),
    Row("py-spy hanging, kill -9 safelaunch", "suspicion", DIES, kill("safelaunch"), arrange=_arranged(hanging),
        needs=_needs),
]  # fmt: skip
