"""Jacobi iterations on a grid that is divided among the ranks: sends, receives and all_reduce, no optimizer."""

import sys
import time

import planting
import torch
import torch.distributed as dist


class Domain:
    def __init__(self, plant: planting.Plant, rank: int, size: int) -> None:
        self.plant, self.rank, self.size = plant, rank, size
        self.cells = torch.zeros(18, 64)
        self.cells[0] = 1.0

    def exchange_halo(self) -> None:
        works = []
        if self.rank > 0:
            works += [dist.isend(self.cells[1].clone(), self.rank - 1), dist.irecv(self.cells[0], self.rank - 1)]
        if self.rank < self.size - 1:
            works += [dist.isend(self.cells[-2].clone(), self.rank + 1), dist.irecv(self.cells[-1], self.rank + 1)]
        for work in works:
            work.wait()

    def relax(self) -> float:
        inner = self.cells[1:-1]
        new = (self.cells[:-2] + self.cells[2:] + inner.roll(1, 1) + inner.roll(-1, 1)) / 4
        change = (new - inner).abs().max().item()
        self.cells[1:-1] = new
        time.sleep(0.15)
        return change

    def boundary(self) -> None:
        if self.plant.hits("boundary"):
            for _ in range(10):
                self.interpolate(self.plant.extra_s / 10)  # SLOW: boundary

    def interpolate(self, cost_s: float) -> None:
        self.cells[:, 0] = self.cells[:, 1]
        time.sleep(cost_s)  # SLOW: boundary


def main() -> int:
    parser = planting.parser()
    parser.add_argument("--reduce-only", action="store_true", help="no sends and receives")
    parser.add_argument("--print-every", type=int, default=50)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    plant = planting.Plant(args, rank)
    domain = Domain(plant, rank, size)
    iteration = 1
    while plant.more(iteration):
        if not args.reduce_only:
            domain.exchange_halo()
        change = torch.tensor(domain.relax())
        domain.boundary()
        dist.all_reduce(change, dist.ReduceOp.MAX)
        if rank == 0 and iteration % args.print_every == 0:
            print(f"iteration {iteration}: {change.item():.3g}", flush=True)
        iteration += 1
    planting.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
