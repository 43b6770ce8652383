"""What a job computes with: said where it is not as it should be or as it was, and written into the manifest."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import PROGRAMS, Job, Result

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


def run(tmp_path: Path, ranks: int, *words: str) -> Result:
    with Job(["--run-name=one", f"--nproc-per-node={ranks}", PROGRAMS / "contracted.py", *words], tmp_path) as job:
        return job.wait()


@pytest.mark.rare  # two runs; the words and the file have their unit tests
def test_a_foreign_device_and_a_changed_batch_are_said_and_in_the_manifest(tmp_path: Path) -> None:
    first = run(tmp_path, 2, "8")
    assert (first.code, first.bundles) == (0, ())
    wrong = "safelaunch: rank 1 computes on cuda:0, which is not the device of the rank's LOCAL_RANK"
    assert wrong in first.stderr and "since the last run" not in first.stderr
    second = run(tmp_path, 3, "4", "--fails")
    assert (
        "since the last run of the name one: batch of a rank 8 → 4, world size 2 → 3: 16 → 12 a step" in second.stderr
    )
    told = second.bundle.json("manifest.json")["job"]
    assert told["computes_on"] == {"0": 0, "1": 0, "2": 0}
    assert told["batch"] == {"0": 4, "1": 4, "2": 4}
    assert (told["world_size"], told["global_batch_if_data_parallel"]) == (3, 12)
