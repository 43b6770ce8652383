"""A short training whose batch is given; a second loader is made, and not used."""

import sys

import torch
import uncompiled  # noqa: F401
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(64, 4))


def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (batch,) in loader:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()


iter(DataLoader(data, batch_size=3))
unused = iter(DataLoader(data, batch_size=5))
train(torch.nn.Linear(4, 4), DataLoader(data, batch_size=int(sys.argv[1])))
