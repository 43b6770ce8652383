"""The probe in an interpreter that has no safelaunch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import safelaunch

BEACON = Path(safelaunch.__file__).parent / "beacon"
ALONE = f"""
import json, sys
package = type(sys)("_safelaunch_beacon")
package.__path__ = [{os.fspath(BEACON)!r}]
sys.modules["_safelaunch_beacon"] = package
from _safelaunch_beacon import addon_probes, marks
probe = addon_probes.load("consistency")
names = [name for name in sys.modules if name.partition(".")[0] == "safelaunch"]
print(json.dumps([probe.__name__, probe.marks is marks, addon_probes.load("consistency") is probe, names]))
"""


def test_probe_imports_only_the_ranks_beacon() -> None:
    done = subprocess.run([sys.executable, "-S", "-c", ALONE], cwd="/", capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert json.loads(done.stdout) == ["_safelaunch_beacon.addons.consistency.probe", True, True, []]
