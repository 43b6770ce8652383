"""Makes a check of tensors on a CUDA device that isn't there, and fails where the host would wait for it.

A fake tensor has no values, so whatever reads one raises; a copy between host and device has to be non-blocking.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from safelaunch.addons.consistency import probe, replicas
from safelaunch.addons.consistency import fingerprints

probe.install(str(Path(tempfile.mkdtemp()) / "page"), "1")
waits: list[str] = []


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            target = kwargs.get("device") or args[0].device
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            free = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
            if torch.device(target).type != source.device.type and not free:
                waits.append(f"{func} from {source.device} to {target}")
        return func(*args, **kwargs)


with FakeTensorMode(), torch.no_grad():
    one = torch.empty(64, 32, device="cuda", dtype=torch.bfloat16)
    other, offloaded = torch.empty(7, device="cuda"), torch.empty(5)
    one.grad = torch.empty_like(one)
    tensors = [replicas.Tensor(name, each, (0, 1)) for name, each in (("a", offloaded), ("b", one), ("c", other))]
    series = probe._SeriesWriter(torch, "key", "parameters", tensors)
    series._to_host = lambda numbers: (numbers, None)  # type: ignore[method-assign]  # pinned memory needs a driver
    series.write = lambda: None  # type: ignore[method-assign]  # there are no values
    assert series._device.type == "cuda"
    with Watching():
        series.take(
            probe._CheckTime(1, 1, 1), torch.empty(1024, device="cuda"), [(1, torch.empty((), device="cuda")), (2, 0.5)]
        )
    ((_, numbers, _),) = series.pending
    assert numbers.device.type == "cuda" and numbers.numel() == 3 * 3 + 1024 + 2, numbers.shape
    assert fingerprints.magnitudes(torch, [one, None, other], series._device).shape == (3,)
    found = list(waits)
    with Watching():
        torch.empty(3).to(other.device)
    assert len(waits) == len(found) + 1, "this would wait, and has to be seen"
print("waits:" if found else "never waits", *found)
sys.exit(bool(found))
