"""What NCCL warned of, read from logs in the forms that its versions write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from safelaunch.capture.nccl_log import MAX_BYTES, MAX_WARNINGS, logs_of, parse, path_of

LOG = """\
node1:71:71 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.2<0>

node1:71:80 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]
node1:71:80 [0] NCCL INFO transport/shm.cc:114 -> 2

[2025-11-24 11:20:21] node1:71:80 [0] misc/socket.cc:46 NCCL WARN socketProgress: Connection closed by remote peer b<5>
node1:71:80 [0] misc/socket.cc:46 NCCL WARN socketProgress: Connection closed by remote peer b<5>
node1:72:81 [32735] NCCL WARN Cuda failure 'driver shutting down'
[2026-03-13 22:26:02] host-01.example.com:73 [5] ibvwrap.c:262 NCCL WARN Call to ibv_modify_qp failed with 110
NCCL version 2.21.5+cuda12.4
"""


def test_warnings_are_read_by_process_each_once() -> None:
    assert parse(LOG) == {
        71: ("Failed to open libibverbs.so[.1]", "socketProgress: Connection closed by remote peer b<5>"),
        72: ("Cuda failure 'driver shutting down'",),
        73: ("Call to ibv_modify_qp failed with 110",),
    }


def test_of_very_many_the_first_and_the_last_are_kept() -> None:
    (found,) = parse("".join(f"a:1:1 [0] x.cc:1 NCCL WARN number {n}\n" for n in range(1000))).values()
    assert len(found) == MAX_WARNINGS and (found[0], found[-1]) == ("number 0", "number 999")


def test_a_file_holds_what_its_name_says_or_several_processes(tmp_path: Path) -> None:
    assert path_of("/logs/%h.%p.txt", "node1", 71) == Path("/logs/node1.71.txt")
    assert path_of("%h-100%%-%p.%x", "node1.cluster.example.com", 71) == Path("node1-100%-71.%x")
    one = tmp_path / "nccl.node1.71.log"
    one.write_text(LOG)
    found = logs_of([one, tmp_path / "missing"], "node/node1", [71, 73])
    assert set(found) == {71, 73}
    assert found[73].file == "node/node1/nccl.node1.71.log"


@pytest.mark.parametrize("kind", ["fifo", "link", "directory", "binary"])
def test_what_is_no_log_has_no_warnings(kind: str, tmp_path: Path) -> None:
    path, real = tmp_path / "nccl.log", tmp_path / "real"
    real.write_text(LOG)
    {
        "fifo": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to(real),
        "directory": path.mkdir,
        "binary": lambda: path.write_bytes(os.urandom(4096)),
    }[kind]()
    assert logs_of([path], "node/a", [71]) == {}


def test_a_huge_log_is_read_at_both_ends(tmp_path: Path) -> None:
    path = tmp_path / "nccl.log"
    filler = "node1:71:71 [0] NCCL INFO nothing\n" * (2 * MAX_BYTES // 34)
    path.write_text(f"a:71:1 [0] x.cc:1 NCCL WARN begin\n{filler}a:71:1 [0] x.cc:1 NCCL WARN end\n")
    assert logs_of([path], "node/a", [71])[71].warnings == ("begin", "end")
