"""Spares a rank the import of torch's compiler, which costs as much CPU as all else of its start. Import it after torch.

DDP and the first optimizer step import ``torch._dynamo``, and ask little of it unless something is compiled. Jobs that
start by the hundred share two cores here. What else torch asks for comes from the real module.
"""

import importlib
import os
import sys
import types

import torch


class _Uncompiled(types.ModuleType):
    __path__ = (os.path.join(os.path.dirname(torch.__file__), "_dynamo"),)
    utils = types.SimpleNamespace(get_optimize_ddp_mode=lambda: "no_optimization")
    trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)

    @staticmethod
    def graph_break(*_: object, **__: object) -> None:
        return

    @staticmethod
    def disable(fn=None, *_: object, **__: object):
        return fn if fn is not None else lambda found: found

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get("torch._dynamo") is self:
            del sys.modules["torch._dynamo"]
        return getattr(importlib.import_module("torch._dynamo"), name)


if "torch._dynamo" not in sys.modules:
    torch._dynamo = sys.modules["torch._dynamo"] = _Uncompiled("torch._dynamo")
