"""Trains in more ways than ``replicas.py``, as argument 1 says, healthy or with a planted fault, for argument 2 steps."""

from __future__ import annotations

import copy
import os
import sys
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

KIND, STEPS = sys.argv[1], int(sys.argv[2])
warnings.filterwarnings("ignore")
if KIND not in ("compiled", "compiled-restored", "checkpointed", "scripted"):
    import uncompiled  # noqa: F401
FAULT_AT = 7
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


def sample() -> torch.Tensor:
    return torch.randn(16, 8) + 0.1 * RANK


def loop(run, *optimizers: torch.optim.Optimizer, steps: int = STEPS, before=lambda step: None) -> None:
    for step in range(1, steps + 1):
        loss = run(sample()).square().mean()
        if KIND.endswith("nan") and step == FAULT_AT and RANK == 1:
            loss = loss * float("nan")
        loss.backward()
        before(step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(0.02)


def adam(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for one in modules for p in one.parameters() if p.requires_grad], lr=1e-3)


def tied() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 16)
            self.head = nn.Linear(16, 8, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(x.abs().long() % 8))

    model = DDP(Model())
    loop(model, adam(model))


def compiled() -> None:
    model = torch.compile(DDP(build()), backend="eager")
    loop(model, adam(model))


def zero() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DDP(build())
    loop(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3))


def checkpointed() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.1))
            self.last = nn.Linear(16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(checkpoint(self.second, self.first(x), use_reentrant=False))

    model = DDP(Model())
    loop(model, adam(model))


def backbone() -> None:
    net = build()
    for one in net[:2].parameters():
        one.requires_grad_(False)
    net[1].eval()
    model = DDP(net)
    loop(model, torch.optim.SGD(model.module[3].parameters(), lr=1e-3))


def outside() -> None:
    """A temperature of each rank's own, in the optimizer and in no module."""
    model, own = DDP(build()), nn.Parameter(torch.tensor([1.0 + RANK]))
    loop(lambda x: model(x) * own, torch.optim.AdamW([*model.parameters(), own], lr=1e-3))


def pipeline() -> None:
    """Stages of other sizes on each rank; of one module class, with the same names."""
    torch.manual_seed(RANK)
    stage = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8 if RANK else 1))
    loop(stage, adam(stage))


def pipeline_and_data() -> None:
    """Two stages of two replicas each: DDP over a separate group."""
    stages = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    torch.manual_seed(RANK % 2)
    stage = DDP(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), process_group=stages[RANK % 2])
    loop(stage, adam(stage))


def actors() -> None:
    """Learners share a model; an actor has an older copy of it, and trains a separate model, at another pace."""
    learners = dist.new_group([0, 1])
    if RANK < 2:
        model = DDP(build(), process_group=learners)
        loop(model, adam(model))
    else:
        torch.manual_seed(7)
        own = build()
        loop(own, adam(own), steps=STEPS // 2)


def uneven() -> None:
    from torch.distributed.algorithms.join import Join

    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1)))
    optimizer = adam(model)
    with Join([model]):
        loop(model, optimizer, steps=STEPS - 5 * RANK)


def gan() -> None:
    first, second = DDP(build()), DDP(nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1)))
    one, other = adam(first), adam(second)
    for step in range(STEPS):
        made = first(sample())
        second(made.detach()).square().mean().backward()
        other.step()
        other.zero_grad()
        if step % 3 == 0:
            second(made).mean().backward()
            one.step()
            one.zero_grad()
        time.sleep(0.02)


def averaged() -> None:
    from torch.optim.swa_utils import AveragedModel

    model = DDP(build())
    mean = AveragedModel(model)
    loop(model, adam(model), before=lambda step: mean.update_parameters(model) if RANK == 0 else None)


def grown() -> None:
    """Layers and parameter groups that come later, and a new DDP around them."""
    net = build()
    model = DDP(net)
    optimizer = adam(model)
    loop(model, optimizer, steps=STEPS // 2)
    net.append(nn.Linear(1, 1))
    for one in net[-1].parameters():
        dist.broadcast(one.data, 0)
    optimizer.add_param_group({"params": net[-1].parameters()})
    model = DDP(net)
    loop(model, optimizer, steps=STEPS // 2)


def experts() -> None:
    """Experts of each rank's own, which DDP is told to ignore."""
    net = build()
    torch.manual_seed(RANK)
    net.append(nn.Linear(1, 1))
    DDP._set_params_and_buffers_to_ignore_for_model(net, ["4.weight", "4.bias"])
    model = DDP(net)
    loop(model, adam(model))


def unshared_buffers() -> None:
    model = DDP(build(), broadcast_buffers=False)
    loop(model, adam(model))


def compressed() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    model = DDP(nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1)))
    model.register_comm_hook(
        power.PowerSGDState(None, start_powerSGD_iter=5, min_compression_rate=0.1), power.powerSGD_hook
    )
    loop(model, adam(model))


def scripted() -> None:
    net = build()
    net[3] = torch.jit.script(net[3])
    model = DDP(net)
    loop(model, adam(model))


def closures() -> None:
    model = DDP(build())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(sample()).square().mean()
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)
        time.sleep(0.02)


def two_dimensions() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))

    def run(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(mesh.get_local_rank("dp"))
        return net(torch.randn(16, 8))

    loop(run, adam(net))


def fsdp_nan() -> None:
    from torch.distributed.fsdp import fully_shard

    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    for layer in (net[0], net[2], net):
        fully_shard(layer)
    loop(net, adam(net))


def fsdp1(strategy: str, *, originals: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if "HYBRID" in strategy else None
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    how = {"sharding_strategy": ShardingStrategy[strategy], "device_mesh": mesh, "use_orig_params": originals}
    net[0] = FullyShardedDataParallel(net[0], device_id=torch.device("cpu"), **how)
    model = FullyShardedDataParallel(net, device_id=torch.device("cpu"), **how)

    def spoil(step: int) -> None:
        if KIND.endswith("flip") and step == FAULT_AT and RANK == WORLD - 1:
            own = next(one for one in model.parameters() if one.numel() and one.grad is not None)
            own.data.view(-1)[:1].add_(1.0)

    loop(model, adam(model), before=spoil)


def restored(model: nn.Module | None = None) -> None:
    """Rank 1 alone goes back to an older state."""
    model = DDP(build()) if model is None else model
    old = copy.deepcopy(model.module.state_dict())

    def back(step: int) -> None:
        if step == FAULT_AT and RANK == 1:
            model.module.load_state_dict(old)

    loop(model, adam(model), before=back)


def ends_apart() -> None:
    """Rank 2 makes one step less, and rank 1 differs in the last: only the end of the job completes that check."""
    model = DDP(nn.Linear(8, 8))
    with model.no_sync():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(1, 10 - (RANK == 2)):
            model(torch.ones(4, 8)).square().mean().backward()
            if step == 9 and RANK == 1:
                model.module.weight.data[0, 0] += 1
            optimizer.step()
            optimizer.zero_grad()


def synced_norm() -> None:
    """SyncBatchNorm, which works on GPUs alone: here with the statistics of all ranks by hand."""
    net = build()

    class Synced(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            from torch.distributed.nn.functional import all_reduce

            mean = all_reduce(x.mean(0)) / WORLD
            variance = all_reduce((x - mean).square().mean(0)) / WORLD
            if self.training:
                self.num_batches_tracked += 1
                self.running_mean.lerp_(mean.detach(), 0.1)
                self.running_var.lerp_(variance.detach(), 0.1)
            return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias

    net[1] = Synced(16)
    model = DDP(net)
    loop(model, adam(model))


def thawing() -> None:
    """Layers that thaw on the way, under a new DDP."""
    net = build()
    for one in net[0].parameters():
        one.requires_grad_(False)
    model = DDP(net)
    optimizer = adam(model)
    loop(model, optimizer, steps=STEPS // 2)
    for one in net[0].parameters():
        one.requires_grad_(True)
    optimizer.add_param_group({"params": list(net[0].parameters())})
    loop(DDP(net), optimizer, steps=STEPS // 2)


def own_steps() -> None:
    """Steps at rate 0 on rank 0 alone: what ``torch.distributed.checkpoint.state_dict`` makes to have a state to save."""
    model = DDP(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(STEPS // 10):
        if RANK == 0:
            for one in model.parameters():
                one.grad = torch.zeros_like(one)
            optimizer.param_groups[0]["lr"] = 0.0
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 1e-3
            optimizer.zero_grad()
        loop(model, optimizer, steps=10)


def folds() -> None:
    for _ in range(20):
        model = DDP(nn.Linear(8, 1))
        loop(model, adam(model), steps=3)


def other_optimizer() -> None:
    """Rank 0 has trained something else before, and takes the state of that optimizer."""
    model, other = DDP(build()), build()
    optimizer, before = adam(model), adam(other)
    if RANK == 0:
        loop(other, before, steps=3)
        optimizer.load_state_dict(before.state_dict())
    loop(model, optimizer)


def flipped(step: int, model: DDP) -> None:
    if step == FAULT_AT and RANK == 1:
        model.module[3].weight.data.view(-1).view(torch.int32)[3] ^= 1 << 10


def adapter_flip() -> None:
    class Adapter(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.own = inner, nn.Linear(8, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + self.own(x)

    model = DDP(build())
    if RANK == 1:
        model.module[0] = Adapter(model.module[0])
    loop(model, adam(model), before=lambda step: flipped(step, model))


def ema_flip() -> None:
    model = DDP(build())
    copied = copy.deepcopy(model.module)
    own = torch.optim.SGD(copied.parameters(), lr=0.1)
    if RANK == 0:
        loop(copied, own, steps=1)
    loop(model, adam(model), before=lambda step: flipped(step, model))


def skipped_step() -> None:
    model = DDP(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def before(step: int) -> None:
        if step == FAULT_AT and RANK == 1:
            optimizer.step = lambda: optimizer.__dict__.pop("step")

    loop(model, optimizer, before=before)


KINDS = {
    "own-steps": own_steps,
    "folds": folds,
    "other-optimizer": other_optimizer,
    "adapter-flip": adapter_flip,
    "ema-flip": ema_flip,
    "skipped-step": skipped_step,
    "ends-apart": ends_apart,
    "synced-norm": synced_norm,
    "thawing": thawing,
    "tied": tied,
    "compiled": compiled,
    "zero": zero,
    "checkpointed": checkpointed,
    "backbone": backbone,
    "outside": outside,
    "pipeline": pipeline,
    "pipeline-and-data": pipeline_and_data,
    "actors": actors,
    "uneven": uneven,
    "gan": gan,
    "averaged": averaged,
    "grown": grown,
    "experts": experts,
    "unshared-buffers": unshared_buffers,
    "compressed": compressed,
    "scripted": scripted,
    "closures": closures,
    "2d": two_dimensions,
    "fsdp1-whole": lambda: fsdp1("NO_SHARD", originals=True),
    "fsdp1-hybrid": lambda: fsdp1("HYBRID_SHARD", originals=True),
    "fsdp1-sharded": lambda: fsdp1("FULL_SHARD", originals=False),
    "fsdp1-flip": lambda: fsdp1("NO_SHARD", originals=False),
    "fsdp1-hybrid-flip": lambda: fsdp1("HYBRID_SHARD", originals=True),
    "fsdp2-nan": fsdp_nan,
    "restored": restored,
    "compiled-restored": lambda: restored(torch.compile(DDP(build()), backend="eager")),
}

dist.init_process_group("gloo")
torch.manual_seed(0)
KINDS[KIND]()
dist.barrier()
dist.destroy_process_group()
