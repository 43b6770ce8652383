"""A rank that waits for its own GPU, told from ranks that wait for peers: NCCL's records and synchronizing stacks."""

from __future__ import annotations

from pathlib import Path

from safelaunch.capture.gpu import errors_of

XID = "2026-11-20 10:00:00 NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
OF_A_PROCESS = "2026-11-20 10:00:01 NVRM: Xid (PCI:0000:5e:00): 31, pid=41, name=python, Ch 00000008, MMU Fault"
REPAIRED = "2026-11-20 10:00:02 NVRM: Xid (PCI:0000:3b:00): 63, pid=41, name=python, Row Remapper: remapped"


def test_driver_errors_are_matched_by_pid_and_gpu(tmp_path: Path) -> None:
    for place, uuid in (("0000:3b:00.0", "GPU-aa"), ("0000:5e:00.0", "GPU-bb")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "information").write_text(f"Model: \t NVIDIA H100\nGPU UUID: \t {uuid}\n")
    log = [XID, OF_A_PROCESS, REPAIRED, "python[41]: segfault at 0"]
    assert errors_of(7, "GPU-aa", log, tmp_path) == (XID,)
    assert errors_of(41, "GPU-cc", log, tmp_path) == errors_of(41, "", log, tmp_path) == (OF_A_PROCESS,)
    assert errors_of(7, "GPU-bb", log, tmp_path) == (OF_A_PROCESS,)
    assert errors_of(4, "", log, tmp_path) == errors_of(4, "1", [], tmp_path) == ()
