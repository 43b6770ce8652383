"""Notes at a rank's first step what feeds its loop and where it computes: the batch of its DataLoader, its device."""

from __future__ import annotations

import gc
import os
import sys

from . import layout, log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_KINDS = ("_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter")


@log.guarded
def write(base: str) -> None:
    """``base``: the path of the rank's page. Lines of key TAB number; a key that is not known is left out."""
    found = {"batch": _batch(), **_device()}
    lines = [f"{key}\t{value}\n" for key, value in found.items() if value is not None]
    path = base + layout.CONTRACT_SUFFIX
    with open(path + ".partial", "wb", opener=log.private) as out:
        out.write("".join(lines).encode())
    os.rename(path + ".partial", path)


def _batch() -> int | None:
    """The batch size of the DataLoaders that have given batches so far and are in use; None where these differ."""
    module = sys.modules.get("torch.utils.data.dataloader")
    kinds = {getattr(module, name, None) for name in _KINDS} - {None}
    iterators: list[Any] = [one for one in gc.get_objects() if type(one) in kinds] if kinds else []
    sizes = {getattr(one._index_sampler, "batch_size", None) for one in iterators if one._num_yielded}
    (size,) = sizes if len(sizes) == 1 else (None,)
    return size if type(size) is int else None


def _device() -> dict[str, int | None]:
    """The current one, where a rank that uses CUDA has a choice."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized() or cuda.device_count() < 2:
        return {}
    return {"device": int(cuda.current_device())}
