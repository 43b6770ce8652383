"""Calls every probe on two ranks, under DDP, FSDP and tensor parallel, and ends with 1 where a record is wrong.

NumPy cannot be imported here: ``pip install torch`` alone does not bring it.
"""

import contextlib
import io
import sys

sys.modules["numpy"] = None  # type: ignore[assignment]

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from safelaunch import probes

dist.init_process_group("gloo")
rank = dist.get_rank()


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def spoil(tensor: torch.Tensor) -> None:
    if rank == 1:
        with torch.no_grad():
            tensor.view(-1)[0] += 1


def said(probe, *arguments):  # type: ignore[no-untyped-def]
    """Returns the result of a probe; its table is printed on rank 0 alone."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        found = probe(*arguments)
    assert bool(out.getvalue().strip()) == (rank == 0), out.getvalue()
    print(out.getvalue(), end="", flush=True)
    return found


def ddp() -> None:
    model = DistributedDataParallel(build())
    found = said(probes.check_consistent, model)
    assert found.consistent and found.checked == 7
    spoil(model.module[0].weight)
    assert dict(said(probes.check_consistent, model).differing) == {"module.0.weight": ((0,), (1,))}
    places = said(probes.placements, model)
    assert [(one.placements, one.unit) for one in places] == [((), "")] * 7
    assert [one.dtype for one in places[4:]] == ["float32", "float32", "int64"], "buffers follow the parameters"
    parts = said(probes.sharding, model)
    assert not parts.sharded and (parts.bytes_sharded, parts.bytes_whole) == (0, 112)


def fsdp2() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model = build()
    fully_shard(model[0], mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    places = said(probes.placements, model)
    assert [one.sharded for one in places[:4]] == [True, True, False, False] and places[0].mesh == "shard"
    assert [one.unit for one in places] == ["0", "0", "", "", "", "", ""]
    assert (places[0].dtype, places[0].precision) == ("float32", "param=bfloat16 reduce=float32")
    assert (places[0].shape, places[0].local_shape, places[0].placements) == ((4, 4), (2, 4), ("S(0)",))
    parts = said(probes.sharding, model)
    assert parts.sharded == ("0.weight", "0.bias") and parts.whole == ("1.weight", "1.bias")
    assert (parts.bytes_sharded, parts.bytes_whole) == (40, 32)
    narrow = nn.Linear(4, 1)
    fully_shard(narrow, mesh=mesh)
    assert {one.unit for one in said(probes.placements, narrow)} == {"(root)"}
    assert said(probes.sharding, narrow).sharded == ("weight", "bias"), "rank 0 has the only row, and it is a shard"
    found = said(probes.check_consistent, model)
    assert found.consistent and found.checked == 5, "shards of two ranks are no replicas"
    spoil(model[1].weight)
    assert set(said(probes.check_consistent, model).differing) == {"1.weight"}


def fsdp1() -> None:
    model = FullyShardedDataParallel(build(), device_id=torch.device("cpu"), use_orig_params=True)
    places = said(probes.placements, model)
    assert [(one.placements, one.unit) for one in places] == [(("flat shard",), "(root)")] * 4 + [((), "")] * 3
    assert not said(probes.sharding, model).whole


def tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize_module(build(), mesh, {"0": ColwiseParallel()})
    places = said(probes.placements, model)
    assert [one.sharded for one in places[:4]] == [True, True, False, False] and places[0].mesh == "tp"
    assert said(probes.sharding, model).bytes_sharded == 40
    assert said(probes.check_consistent, model).consistent
    found = said(probes.mesh, mesh)
    assert (found.groups, found.names, found.coordinate) == ({"tp": ((0, 1),)}, ("tp",), (rank,))


def tensors() -> None:
    assert not said(probes.check_consistent, torch.tensor([rank])).consistent
    assert said(probes.check_consistent, torch.arange(4 * (rank + 1))[:4]).consistent, "a part of something larger"
    assert dict(said(probes.check_consistent, {"a": torch.ones(1), f"of {rank}": torch.ones(1)}).differing) == {
        "of 0": ((0,), (1,)),
        "of 1": ((0,), (1,)),
    }
    with contextlib.suppress(TypeError):
        probes.check_consistent([torch.ones(1)])
        raise AssertionError("a list is no mapping")
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    assert probes.check_consistent(torch.tensor([rank]), alone).consistent


ddp()
fsdp2()
fsdp1()
tensor_parallel()
tensors()
assert [one.rank for one in said(probes.memory)] == [0, 1]
assert said(probes.rank_print, "loss", rank) == ("loss 0", "loss 1")
dist.barrier()
dist.destroy_process_group()
