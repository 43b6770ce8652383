"""Trains a small model as argument 1 says, healthy or with a planted fault, for argument 2 steps."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import time

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import safelaunch

KIND, STEPS = sys.argv[1], int(sys.argv[2])
FAULT_AT = 7
PAUSE_S = float(os.environ.get("PAUSE_S", "0.02"))
RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])


def build(norm: bool = False, width: int = 16) -> nn.Sequential:
    middle: list[nn.Module] = [nn.BatchNorm1d(width)] if norm else []
    return nn.Sequential(
        nn.Linear(8, width), *middle, nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
    )


def sample() -> torch.Tensor:
    return torch.randn(16, 8) + 0.1 * RANK


def train(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    before_step=lambda step: None,
    forward=None,
    scaler=None,
    micro: int = 1,
    after=lambda step: None,
) -> None:
    run = forward or model
    for step in range(1, STEPS + 1):
        for part in range(micro):
            quiet = model.no_sync() if isinstance(model, DDP) and part < micro - 1 else contextlib.nullcontext()
            if KIND == "missing-sync" and step >= FAULT_AT and isinstance(model, DDP):
                quiet = model.no_sync()
            with quiet:
                loss = run(sample()).square().mean()
                if KIND == "nan" and step == FAULT_AT and RANK == 1:
                    loss = loss * float("nan")
                (scaler.scale(loss) if scaler else loss).backward()
        before_step(step)
        for optimizer in optimizers:
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
        after(step)
        safelaunch.step(loss=loss + (1e3 if KIND == "loss" and RANK == 1 and step >= FAULT_AT else 0))
        time.sleep(PAUSE_S)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)


def flip(step: int, parameter: torch.Tensor) -> None:
    if step == FAULT_AT and RANK == 2 % WORLD:
        with torch.no_grad():
            parameter.view(-1).view(torch.int32)[3] ^= 1 << 10


def main() -> None:  # noqa: C901, PLR0912, PLR0915 - a list of cases
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    if KIND in ("ddp", "nan", "missing-sync", "loss"):
        model = DDP(build(norm=KIND == "ddp"))
        train(model, [adam(model)])
    elif KIND == "no-sync":
        model = DDP(build(norm=True))
        train(model, [adam(model)], micro=3)
    elif KIND == "two-optimizers":
        model = DDP(build())
        halves = list(model.parameters())
        train(model, [torch.optim.SGD(halves[:3], lr=1e-3), torch.optim.Adam(halves[3:], lr=1e-3)])
    elif KIND == "ema":
        model = DDP(build())
        ema = copy.deepcopy(model.module)

        def follow(step: int) -> None:
            if RANK == 0:  # as many do: only the rank that saves has one
                for old, new in zip(ema.parameters(), model.parameters(), strict=True):
                    old.data.lerp_(new.data, 0.1)

        train(model, [adam(model)], after=follow)
    elif KIND == "scaler":
        model = DDP(build())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=5)  # overflows first, and again

        def forward(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return model(x).float()

        train(model, [adam(model)], forward=forward, scaler=scaler)
    elif KIND == "lora":
        net = build()
        for one in net[0].parameters():
            one.requires_grad_(False)
        model = DDP(net)
        train(model, [adam(model)])
    elif KIND == "alone":  # independent models, as in a sweep
        torch.manual_seed(RANK)
        net = build(norm=True)
        train(net, [adam(net)])
    elif KIND == "local-sgd":
        model = DDP(build())
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post

        group, _ = dist.new_subgroups(group_size=1)
        state = post.PostLocalSGDState(process_group=None, subgroup=group, start_localSGD_iter=3)
        model.register_comm_hook(state, post.post_localSGD_hook)
        train(model, [adam(model)])
    elif KIND in ("fsdp2", "hsdp", "hsdp-flip"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        shape = (WORLD,) if KIND == "fsdp2" else (2, WORLD // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("shard",) if KIND == "fsdp2" else ("replicate", "shard"))
        net = build()
        fully_shard(net, mesh=mesh)
        first = next(iter(net.parameters()))
        spoil = (lambda step: flip(step, first.to_local())) if KIND == "hsdp-flip" else (lambda step: None)
        train(net, [torch.optim.AdamW(net.parameters(), lr=1e-3)], before_step=spoil)
    elif KIND in ("tp", "tp-flip"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            SequenceParallel,
            parallelize_module,
        )

        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
        net = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
        net = parallelize_module(net, mesh, plan)
        from torch.distributed.tensor import distribute_module

        distribute_module(net[0], mesh)
        from torch.distributed.tensor import DTensor, Replicate

        norm = net[0]
        spoil = (lambda step: flip(step, norm.weight.to_local())) if KIND == "tp-flip" else (lambda step: None)

        def forward(x: torch.Tensor) -> torch.Tensor:
            torch.manual_seed(1)
            x = norm(DTensor.from_local(torch.randn(16, 8), mesh, [Replicate()], run_check=False)).to_local()
            return net[3](net[2](net[1](x)))

        train(net, [torch.optim.AdamW(net.parameters(), lr=1e-3)], before_step=spoil, forward=forward)
    elif KIND == "seed":
        torch.manual_seed(RANK)
        model = DDP(build(), init_sync=False)
        train(model, [adam(model)])
    elif KIND == "forgotten-broadcast":
        model = DDP(build())
        if RANK == 0:  # a checkpoint that only rank 0 loads
            with torch.no_grad():
                model.module[2].weight.mul_(1.5)
        train(model, [adam(model)])
    elif KIND in ("left-out", "left-out-adam"):
        net = build()
        net[4].requires_grad_(False)
        model = DDP(net)
        net[4].requires_grad_(True)  # unfrozen after DDP has looked
        train(model, [adam(model) if KIND == "left-out-adam" else torch.optim.SGD(model.parameters(), lr=1e-3)])
    elif KIND == "bit-flip":
        model = DDP(build())
        train(model, [adam(model)], before_step=lambda step: flip(step, model.module[2].weight))
    elif KIND == "batch-norm":
        model = DDP(build())
        model.module.append(nn.BatchNorm1d(1, affine=False))  # after DDP has looked
        train(model, [adam(model)])
    dist.destroy_process_group()


main()
