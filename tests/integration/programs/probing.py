"""Calls every probe on two ranks, and ends with 1 where a record is not what it has to be."""

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from safelaunch import probes

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
found = probes.check_consistent(model)
assert found.consistent and found.checked == 7
if rank == 1:
    with torch.no_grad():
        model[0].weight[0, 0] += 1
assert dict(probes.check_consistent(model).differing) == {"0.weight": ((0,), (1,))}
assert not probes.check_consistent(torch.tensor([rank])).consistent
assert probes.check_consistent(torch.arange(4 * (rank + 1))[:4]).consistent  # a part of something larger

mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
fully_shard(model[0], mesh=mesh)
places = probes.placements(model)
assert [one.sharded for one in places] == [True, True, False, False] and places[0].mesh == "shard"
parts = probes.sharding(model)
assert parts.sharded == ("0.weight", "0.bias") and parts.whole == ("1.weight", "1.bias")
assert (parts.bytes_sharded, parts.bytes_whole) == (40, 32)
assert [one.rank for one in probes.memory()] == [0, 1]
assert probes.mesh(mesh).groups == {"shard": ((0, 1),)}
assert probes.rank_print("loss", rank) == ("loss 0", "loss 1")
dist.destroy_process_group()
