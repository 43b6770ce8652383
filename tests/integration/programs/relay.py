"""Registers ``relay``, a backend in Python outside torch: every call goes on to a gloo of its own.

It is what nccl4py is to NCCL: torch 2.15 records its calls into a recorder under the name that the backend gives. What
the gloo within records is forgotten at once, so that this recorder is the only one with entries. ``import relay``
before ``init_process_group("relay")``.
"""

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

PASSED_ON = (
    "allgather", "allreduce", "allreduce_coalesced", "alltoall", "barrier", "broadcast", "gather", "recv", "reduce",
    "scatter", "send",
)  # fmt: skip


class Relay(c10d.Backend):
    """``options``: c10d's, of the group to make."""

    def __init__(self, options: dist.distributed_c10d._DistributedBackendOptions) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._gloo = c10d.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)

    def getBackendName(self) -> str:  # noqa: N802
        return "relayed"


def _passed_on(name: str) -> object:
    def call(self: Relay, *args: object) -> object:
        work = getattr(self._gloo, name)(*args)
        if hasattr(c10d, "_reset_fr_trace"):
            c10d._reset_fr_trace()
        return work

    return call


for _name in PASSED_ON:
    setattr(Relay, _name, _passed_on(_name))
dist.Backend.register_backend("relay", lambda options, _: Relay(options), extended_api=True, devices=["cpu"])
