"""One Flight Recorder dump of a gloo job and one of an NCCL job."""

from __future__ import annotations

import json
from typing import Any

# torch 2.13 on gloo: the group is "0" in entries and "" in pg_config, the state never changes.
GLOO_ENTRY: dict[str, Any] = {
    "collective_seq_id": 6,
    "frames": [
        {"filename": "/env/torch/distributed/distributed_c10d.py", "line": 3245, "name": "all_reduce"},
        {"filename": "/home/me/train.py", "line": 18, "name": "<module>"},
    ],
    "input_dtypes": ["Float"],
    "input_sizes": [[7, 3]],
    "is_p2p": False,
    "op_id": 6,
    "output_dtypes": ["Float"],
    "output_sizes": [[7, 3]],
    "p2p_seq_id": 0,
    "pg_id": 0,
    "process_group": ("0", "default_pg"),
    "profiling_name": "gloo:all_reduce",
    "record_id": 6,
    "retired": False,
    "state": "scheduled",
    "thread_id": "140298925697920",
    "thread_name": "python3",
    "time_created_ns": 1795170632995829080,
    "time_discovered_completed_ns": None,
    "time_discovered_started_ns": None,
    "timeout_ms": 1800000,
}
GLOO: dict[str, Any] = {
    "comm_lib_version": "",
    "entries": [{**GLOO_ENTRY, "retired": True, "collective_seq_id": 5, "record_id": 5}, GLOO_ENTRY],
    "pg_config": {"": {"desc": "", "name": "", "ranks": "[]"}},
    "pg_status": {
        "0": {"last_completed_collective": 5, "last_enqueued_collective": 6, "last_started_collective": -1},
    },
    "version": "2.10",
}
# NCCL, as torch 2.4 wrote it.
NCCL: dict[str, Any] = {
    "version": "2.4",
    "pg_config": {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"},
        "1": {"name": "1", "desc": "tp", "ranks": "[1]"},
    },
    "pg_status": {"0": {"last_enqueued_collective": 2, "last_started_collective": 1, "last_completed_collective": 1}},
    "entries": [
        {
            "frames": [{"name": "forward", "filename": "/home/me/model.py", "line": 3}],
            "record_id": 0,
            "pg_id": 0,
            "process_group": ("0", "default_pg"),
            "collective_seq_id": 1,
            "p2p_seq_id": 0,
            "op_id": 1,
            "profiling_name": "nccl:all_reduce",
            "time_created_ns": 1724779239936775119,
            "input_sizes": [[3, 4]],
            "input_dtypes": ["Float"],
            "output_sizes": [[3, 4]],
            "output_dtypes": ["Float"],
            "state": "completed",
            "time_discovered_started_ns": 1724779239943775119,
            "time_discovered_completed_ns": 1724779239953775119,
            "retired": False,
            "timeout_ms": 600000,
            "is_p2p": False,
        },
        {"process_group": ("0", "default_pg"), "collective_seq_id": 2, "profiling_name": "nccl:all_gather",
         "state": "scheduled", "retired": False},
        {"process_group": ("0", "default_pg"), "p2p_seq_id": 3, "profiling_name": "nccl:send 0->1",
         "state": "started", "is_p2p": True},
    ],
}  # fmt: skip


def as_json(dump: dict[str, Any]) -> bytes:
    """The JSON of the same dump: numbers of ``pg_status`` as strings, times 0 for None, no frames."""
    dump = json.loads(json.dumps(dump))
    for entry in dump["entries"]:
        entry.pop("frames", None)
        entry.update({key: 0 for key, value in entry.items() if value is None})
    dump["pg_status"] = {g: {k: str(v) for k, v in s.items()} for g, s in dump["pg_status"].items()}
    return json.dumps(dump).encode()


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every position below ``tree``, down to the last number of the last list."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    return [place for key, value in items for place in ((*path, key), *places(value, (*path, key)))]
