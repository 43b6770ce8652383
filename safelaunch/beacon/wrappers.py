"""Handles modules and tensors of this process that are wrapped or sharded."""

from __future__ import annotations

import gc
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def modules() -> list[Any]:
    kind = sys.modules["torch"].nn.Module
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind) and "_modules" in thing.__dict__]


def is_a(module: Any, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(module).__mro__)


def is_fsdp1(module: Any) -> bool:
    return is_a(module, "FullyShardedDataParallel")


_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def clean(name: str) -> str:
    """Returns a module's name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "placements") and hasattr(tensor, "to_local") else tensor


def bytes_of(tensor: Any) -> int:
    here = local(tensor)
    return int(here.numel() * here.element_size())
