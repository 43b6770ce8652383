"""Jobs over a backend outside torch (``site-packages/relay.py``), whose calls torch 2.15 records under its own name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.qa import zoo
from tests.support.jobs import Job
from tests.support.paths import PROGRAMS

pytestmark = [pytest.mark.torch, pytest.mark.nightly, pytest.mark.timeout(240)]

NAME = "relayed"  # the backend is registered as ``relay``, and its object gives this name
HANGS = ("all-gather", "asleep", "gil", "group-order", "left-out", "recv-recv", "init-asleep")


@pytest.fixture(autouse=True)
def _records_every_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend is no code of the user's: it is where installed packages are."""
    from torch.distributed import distributed_c10d

    if not hasattr(distributed_c10d, "_maybe_attach_flight_recorder"):
        pytest.skip("this torch records only the backends of its own (2.15 records all)")
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(PROGRAMS / "site-packages"), before))))


@pytest.mark.parametrize("name", HANGS)
def test_a_hang(name: str, tmp_path: Path) -> None:
    specimen = zoo.BY_NAME[name]
    with zoo.start(specimen, 1, tmp_path, more=["--backend=relay"]) as job:
        result = job.wait()
    assert zoo.judge(specimen, 1, result) == [], f"{result.verdict['summary']}\n{result.stderr}"
    records = {path.parent.name: path.read_text() for path in result.bundle.path.glob("ranks/*/flight_recorder.json")}
    recorded = {rank for rank, text in records.items() if f'"{NAME}:' in text}
    assert "gloo:" not in "".join(records.values()), "the verdict has to rest on the backend's own record"
    assert recorded == ({str(rank) for rank in range(specimen.ranks)} if specimen.program != "late" else set())


def test_a_crash(tmp_path: Path) -> None:
    """The rank that fails leaves the record of its backend."""
    words = ["--nproc-per-node=3", PROGRAMS / "crashing.py", "--how=exception", "--culprit=1", "--backend=relay"]
    with Job(words, tmp_path) as job:
        result = job.wait()
    verdict = result.verdict
    assert (verdict["cause"], [one["rank"] for one in verdict["culprits"]]) == ("rank-exception", [1])
    assert f'"{NAME}:all_reduce' in result.bundle.text("ranks/1/flight_recorder.json")
