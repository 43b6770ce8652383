"""Records this rank's DataLoader batch size and device at its first step."""

from __future__ import annotations

import gc
import sys

from . import layout, log, page

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LOADERS = ("_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter")


@log.guarded
def note(base: str) -> None:
    contract = {"batch": _batch(), "device": _device()}
    page.note(base + layout.CONTRACT_SUFFIX, {key: value for key, value in contract.items() if value is not None})


def _batch() -> int | None:
    """Returns the batch size of DataLoaders that have yielded a batch and are in use; None if their sizes differ."""
    module = sys.modules.get("torch.utils.data.dataloader")
    kinds = {getattr(module, name, None) for name in _LOADERS} - {None}
    iterators: list[Any] = [thing for thing in gc.get_objects() if type(thing) in kinds] if kinds else []
    sizes = {getattr(iterator._index_sampler, "batch_size", None) for iterator in iterators if iterator._num_yielded}
    (size,) = sizes if len(sizes) == 1 else (None,)
    return size if type(size) is int else None


def _device() -> int | None:
    # Only for a rank that uses CUDA and has a choice.
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized() or cuda.device_count() < 2:
        return None
    return int(cuda.current_device())
