"""Classifies images with DDP. The images are augmented in the main process, as with ``num_workers=0``."""

import time

import planting
import torch
import torch.distributed as dist
import torch.nn.functional as F
import uncompiled  # noqa: F401
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH = 8


class Images(Dataset):
    def __init__(self, plant: planting.Plant, length: int = 4096) -> None:
        self.plant, self.length = plant, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        image = torch.full((3, 8, 8), float(index % 7))
        return self.augment(image), index % 10

    def augment(self, image: torch.Tensor) -> torch.Tensor:
        time.sleep(0.004)
        if self.plant.hits("augment"):
            time.sleep(self.plant.extra_s / BATCH)  # SLOW: augment
        return image.flip(-1)


class Net(nn.Module):
    def __init__(self, plant: planting.Plant) -> None:
        super().__init__()
        self.plant = plant
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(8 * 36, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        time.sleep(0.08)
        if self.plant.hits("forward"):
            time.sleep(self.plant.extra_s)  # SLOW: forward
        return self.head(x)


class ModelAverage:
    """An exponential average of the weights, updated after each optimizer step."""

    def __init__(self, model: nn.Module, plant: planting.Plant) -> None:
        self.weights = [parameter.detach().clone() for parameter in model.parameters()]
        self.plant = plant

    def update(self, model: nn.Module) -> None:
        for mine, parameter in zip(self.weights, model.parameters()):
            mine.lerp_(parameter.detach(), 0.01)
        if self.plant.hits("average"):
            time.sleep(self.plant.extra_s)  # SLOW: average


def watch_gradients(model: nn.Module, plant: planting.Plant) -> None:
    def look(grad: torch.Tensor) -> None:
        if plant.hits("hook"):
            time.sleep(plant.extra_s)  # SLOW: hook

    model.features[0].weight.register_hook(look)


def evaluate(model: nn.Module, batches: int) -> float:
    right = 0.0
    with torch.no_grad():
        for _ in range(batches):
            right += model(torch.ones(BATCH, 3, 8, 8)).argmax(1).eq(1).float().mean().item()
    return right / batches


def endless(loader: DataLoader, sampler: DistributedSampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main() -> None:
    parser = planting.parser()
    parser.add_argument("--evaluate", choices=("all", "first", ""), default="")
    parser.add_argument("--every", type=int, default=100, help="steps between evaluations")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    plant = planting.Plant(args, rank)
    torch.manual_seed(0)
    net = Net(plant)
    watch_gradients(net, plant)
    model = DistributedDataParallel(net)
    average = ModelAverage(net, plant)
    dataset = Images(plant)
    sampler = DistributedSampler(dataset)
    batches = endless(DataLoader(dataset, BATCH, sampler=sampler), sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    step = 1
    while plant.more(step):
        images, labels = next(batches)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(net)
        if args.evaluate and step % args.every == 0:
            if args.evaluate == "all" or rank == 0:
                evaluate(net, 20)
            dist.barrier()
        step += 1
    planting.finish()


if __name__ == "__main__":
    main()
