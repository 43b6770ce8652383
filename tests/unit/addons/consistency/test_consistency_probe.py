"""The consistency checks in a rank: steps that its peers make as well, and tensors that several ranks hold equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from safelaunch.addons.consistency import probe, replicas

EVERY = 3


class Optimizer:
    pass


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> probe._Owner:
    monkeypatch.setattr(probe, "_every", EVERY)
    return probe._Owner(None, "module of 0,1 0")


def rounds(owner: probe._Owner, count: int, *optimizers: Optimizer) -> list[bool]:
    """Steps for which gradients were to be averaged: whether each has a check."""
    due = []
    for _ in range(count):
        owner.ready = True
        first, *_ = [owner.stepped(one) for one in optimizers]
        due.append(first)
    return due


def test_first_and_every_third_round_are_checked(owner: probe._Owner) -> None:
    assert rounds(owner, 6, Optimizer()) == [True, False, True, False, False, True]


def test_steps_of_one_rank_do_not_count_as_rounds(owner: probe._Owner) -> None:
    warm, own = Optimizer(), Optimizer()
    for _ in range(5):
        owner.stepped(warm)
    assert rounds(owner, 2, own) == [True, False]
    owner.stepped(own)
    assert rounds(owner, 1, own) == [True]


def test_steps_without_rounds_are_checked_equally_often(owner: probe._Owner) -> None:
    one = Optimizer()
    rounds(owner, 1, one)
    assert [owner.stepped(one) for _ in range(5)] == [False, True, False, False, True]


def test_optimizers_in_same_round_count_as_one_step(owner: probe._Owner) -> None:
    one, other = Optimizer(), Optimizer()
    assert rounds(owner, 3, one, other) == [True, False, True]
    owner.ready = True
    assert not owner.stepped(other)
    assert rounds(owner, 2, one, other) == [False, True]


def test_next_optimizer_counts_after_leader_is_gone(owner: probe._Owner) -> None:
    def before() -> None:
        owner.stepped(Optimizer())

    before()
    assert [owner.stepped(one) for one in [Optimizer()] * 2] == [False, True]


# --- what is held equal -----------------------------------------------------------------------------------------------


class DistributedDataParallel:
    def __init__(self, module: Any, broadcast_buffers: bool) -> None:
        self.module, self.broadcast_buffers, self.process_group = module, broadcast_buffers, (0, 1)
        self.modules_buffers, self.require_forward_param_sync = [*module.buffers()], True


@pytest.mark.parametrize("broadcast", [True, False])
def test_batchnorm_buffers_without_broadcast_are_not_compared(monkeypatch: pytest.MonkeyPatch, broadcast: bool) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    ddp, optimizer = DistributedDataParallel(net, broadcast), torch.optim.SGD(net.parameters())
    owner = probe._Owner(torch, "module of 0,1 0")
    monkeypatch.setattr(replicas, "owned", lambda optimizer: [(ddp, [])])
    monkeypatch.setattr(replicas, "_ranks_of", lambda group: group)
    monkeypatch.setattr(probe, "_owner_of", lambda torch, ddp: owner)
    probe._Tracker(torch, optimizer)._find(optimizer)
    (buffers,) = owner.buffers
    found = {one.name: one.group for one in buffers._tensors(ddp)}
    assert found == dict.fromkeys(("1.running_mean", "1.running_var", "1.num_batches_tracked"), (0, 1)[: 2 * broadcast])
    buffers.synced = False
    assert buffers.is_unshared() is not broadcast, "DDP's next forward pass broadcasts, or none does"


class DeepSpeedEngine(torch.nn.Module):
    enable_backward_allreduce = True
    seq_data_parallel_group = (0, 1)

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize("averages", [True, False])
def test_deepspeed_replicas_exclude_experts(monkeypatch: pytest.MonkeyPatch, averages: bool) -> None:
    monkeypatch.setattr(replicas, "_ranks_of", lambda group: group)
    monkeypatch.setattr(DeepSpeedEngine, "enable_backward_allreduce", averages)
    engine = DeepSpeedEngine(torch.nn.Linear(2, 2))
    engine.module.bias.allreduce = False
    ((_, tensors),) = replicas.owned(torch.optim.SGD(engine.parameters()))
    assert {one.name: one.group for one in tensors} == {"weight": (0, 1) if averages else (), "bias": ()}
