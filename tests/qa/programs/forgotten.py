"""The tutorial of the Flight Recorder, with equal sizes: one rank makes a call that its peers forget; these end."""

import os

import torch
import torch.distributed as dist
from training import parser

options = parser.parse_args()
dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
a = torch.full((3, 4), float(rank))

for _ in range(2):
    dist.all_reduce(a)

if rank == options.culprit:
    b = torch.full((3, 4), float(rank))
    dist.all_reduce(b)  # FAILS: forgotten

for _ in range(2):
    dist.all_reduce(a)
