"""What a job computes with: said where it is not as it should be, and written into the manifest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import Job
from tests.support.paths import PROGRAMS

pytestmark = [pytest.mark.torch, pytest.mark.nightly, pytest.mark.timeout(240)]


def test_a_foreign_device_is_said_and_the_contract_is_in_the_manifest(tmp_path: Path) -> None:
    words = ["--nproc-per-node=3", PROGRAMS / "contracted.py", "4", "--fails"]
    with Job(words, tmp_path) as job:
        result = job.wait()
    wrong = "safelaunch: ranks 1-2 compute on cuda:0, which is not the device of the rank's LOCAL_RANK"
    assert wrong in result.stderr
    found = result.bundle.json("manifest.json")["job"]
    assert found["computes_on"] == {"0": 0, "1": 0, "2": 0}
    assert found["batch"] == {"0": 4, "1": 4, "2": 4}
    assert (found["world_size"], found["global_batch_if_data_parallel"]) == (3, 12)
