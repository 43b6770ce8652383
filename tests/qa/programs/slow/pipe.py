"""torch's pipeline parallelism, one stage per rank."""

import time

import planting
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

MICROBATCHES = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.012)
        return torch.tanh(self.linear(x))


class Stage(nn.Module):
    def __init__(self, plant: planting.Plant) -> None:
        super().__init__()
        self.plant = plant
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        if self.plant.hits("uneven"):  # twice the layers
            for layer in self.layers:
                x = layer(x)
        if self.plant.hits("forward"):
            x = self.normalize(x)
        return x

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.plant.extra_s / MICROBATCHES)  # SLOW: forward
        return x / (1 + x.abs().max())


def main() -> None:
    parser = planting.parser()
    parser.add_argument("--gpipe", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    plant = planting.Plant(args, rank)
    module = Stage(plant)
    stage = PipelineStage(module, rank, world, torch.device("cpu"))
    kind = ScheduleGPipe if args.gpipe else Schedule1F1B
    schedule = kind(stage, n_microbatches=MICROBATCHES, loss_fn=lambda out, target: (out - target).pow(2).mean())
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    step = 1
    while plant.more(step):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(torch.randn(8, 16))
        elif rank == world - 1:
            schedule.step(target=torch.randn(8, 16), losses=[])
        else:
            schedule.step()
        optimizer.step()
        step += 1
    planting.finish()


if __name__ == "__main__":
    main()
