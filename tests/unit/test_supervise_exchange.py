"""Other GPUs for ranks that are started anew: what is written for them, and how long they wait for it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from safelaunch.beacon import layout, leases
from safelaunch.errors import ResourceError
from safelaunch.launch.paths import RunPaths
from safelaunch.model import Suspect
from safelaunch.supervise.exchange import Exchange, GpuExchange

BAD, GOOD = "GPU-1", "GPU-2"


def suspect(name: str = BAD) -> Suspect:
    return Suspect(unit="gpu", name=name, host="a", times=2, chance=0.1, words="", before=())


def exchange_of(run: Path, exchange: Exchange = lambda gpu: (GOOD, ""), *, wanted: bool = True) -> GpuExchange:
    return GpuExchange(RunPaths(run), exchange, wanted=wanted)


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"GPU-0,{BAD}")


@pytest.mark.usefixtures("visible")
def test_ranks_wait_for_the_decision(tmp_path: Path) -> None:
    exchange = exchange_of(tmp_path)
    exchange.expect()
    rank = threading.Thread(target=lambda: leases.exchange(os.fspath(tmp_path), os.getpid()))
    rank.start()
    assert rank.is_alive() and os.environ["CUDA_VISIBLE_DEVICES"] == f"GPU-0,{BAD}"
    exchange.decide([suspect()])
    rank.join(60)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == f"GPU-0,{GOOD}"


@pytest.mark.usefixtures("visible")
@pytest.mark.parametrize("why", ["nothing is expected", "not wanted", "dropped", "no supervisor", "too long"])
def test_ranks_do_not_wait_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    exchange, supervisor = exchange_of(tmp_path, wanted=why != "not wanted"), os.getpid()
    if why != "nothing is expected":
        exchange.expect()
    if why == "dropped":
        exchange.drop()
    if why == "no supervisor":
        supervisor = 2**22 + 1  # beyond the largest pid
    if why == "too long":
        monkeypatch.setattr(layout, "EXCHANGE_S", 0.05)
    leases.exchange(os.fspath(tmp_path), supervisor)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == f"GPU-0,{BAD}"


def test_a_gpu_that_cannot_be_exchanged_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def none_free(gpu: str) -> tuple[str, str]:
        raise ResourceError("no other is free")

    exchange = exchange_of(tmp_path, none_free)
    exchange.expect()
    exchange.decide([suspect()])
    assert f"the ranks keep GPU {BAD}: no other is free" in capfd.readouterr().err
    assert not list(tmp_path.iterdir()), "the ranks wait no longer"
    exchange_of(tmp_path, lambda gpu: None).decide([suspect("GPU-of-another-node")])
    assert capfd.readouterr().err == ""
