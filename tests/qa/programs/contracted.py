"""Every rank computes on device 0, by a stand-in for CUDA, and is fed by a DataLoader. The last rank can fail.

contracted.py BATCH [--fails]
"""

import os
import sys

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401
from torch.utils.data import DataLoader, TensorDataset

torch.cuda.is_initialized = lambda: True
torch.cuda.device_count = lambda: 2
torch.cuda.current_device = lambda: 0
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (samples,) in DataLoader(TensorDataset(torch.zeros(64, 4)), batch_size=int(sys.argv[1])):
    model(samples).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
if "--fails" in sys.argv and int(os.environ["RANK"]) == dist.get_world_size() - 1:
    raise ValueError("after the last batch")
dist.barrier()
dist.destroy_process_group()
