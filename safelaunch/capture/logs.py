"""The output of a rank and the kernel log, as text for the bundle."""

from __future__ import annotations

import datetime as dt
import os
import re
import shutil
import time
from collections.abc import Iterable

from safelaunch.capture import command
from safelaunch.capture.result import Result, attempt, within
from safelaunch.system.errors import CaptureError

STREAMS = {1: "out", 2: "err"}
MAX_KERNEL_LINES = 200
NOTHING = "(nothing relevant)"
_MAX_KMSG_BYTES = 8 << 20

# Kernel messages that explain a hang or a killed rank: memory, GPUs, stuck tasks, storage, network, hardware.
_RELEVANT = re.compile(
    r"out of memory|oom[-_ ]?kill|killed process|memory cgroup|\bnvrm\b|\bxid\b|nvidia|nvlink|nvswitch"
    r"|gpu has fallen|hung task|blocked for more than|soft lockup|hard lockup|rcu.*stall|segfault"
    r"|general protection|traps:|i/o error|blk_update_request|nvme.*(timeout|reset|abort)|ext4-fs error"
    r"|xfs.*(error|corrupt)|\bnfs\b|\blustre|\bceph|\bgpfs|\bmmfs|\bbeegfs|fuse.*(error|abort)"
    r"|server .* not responding|remounting filesystem|machine check|\bmce: .*error|edac .*error|hardware error"
    r"|aer: |pcie bus error|dmar: .*fault|iommu.*fault|mlx5.*(error|timeout|fail|down)|link (is )?down"
    r"|thermal.*critical|temperature above|throttl",
    re.IGNORECASE,
)


def log_tail(records: Iterable[tuple[int, int, bytes]]) -> str:
    """The records of a rank's ring (CLOCK_REALTIME ns, stream, bytes) as ``log_tail.txt``, not yet redacted.

    Each line of output becomes ``HH:MM:SS.mmm out| text``, in UTC, with the time of its first part. A line that a
    progress bar rewrote with carriage returns shows its last state.
    """
    lines: list[tuple[int, str, bytes]] = []
    open_lines: dict[str, tuple[int, bytes]] = {}
    for time_ns, stream, data in records:
        name = STREAMS.get(stream, str(stream))
        begun, rest = open_lines.pop(name, (time_ns, b""))
        *whole, rest = (rest + data).split(b"\n")
        for number, line in enumerate(whole):
            lines.append((begun if number == 0 else time_ns, name, line))
        if rest:
            open_lines[name] = (time_ns if whole else begun, rest)
    lines += [(begun, name, rest) for name, (begun, rest) in open_lines.items()]
    lines.sort(key=lambda line: line[0])
    return "".join(f"{clock_text(begun)} {name}| {_visible(line)}\n" for begun, name, line in lines)


def clock_text(time_ns: int) -> str:
    """CLOCK_REALTIME nanoseconds as ``HH:MM:SS.mmm`` UTC."""
    moment = dt.datetime.fromtimestamp(time_ns // 1_000_000_000, dt.timezone.utc)
    return f"{moment:%H:%M:%S}.{time_ns // 1_000_000 % 1000:03d}"


def kernel_log(*, deadline_s: float = 3.0) -> Result[str]:
    """The last lines of the kernel log that may explain a hang, newest last; never raises.

    From ``/dev/kmsg``, else ``journalctl -k``: many systems reserve the former for root (``kernel.dmesg_restrict``).
    """

    def read() -> str:
        begin = time.monotonic()
        try:
            lines = within(deadline_s / 2, "/dev/kmsg", _kmsg)
        except (OSError, CaptureError) as error:
            lines = _journal(deadline_s - (time.monotonic() - begin), error)
        found = relevant(lines)
        return "\n".join(found or [NOTHING]) + "\n"

    return attempt("kernel log", read)


def relevant(lines: Iterable[str]) -> list[str]:
    """The last ``MAX_KERNEL_LINES`` lines that may explain a hang or a killed process."""
    return [line for line in lines if _RELEVANT.search(line)][-MAX_KERNEL_LINES:]


def parse_kmsg(record: str, boot_unix_s: float) -> str:
    """One record of ``/dev/kmsg`` (ABI/testing/dev-kmsg) as ``YYYY-MM-DD HH:MM:SS text``; ``""`` if none."""
    head, separator, text = record.partition(";")
    fields = head.split(",")
    if not separator or len(fields) < 3 or not fields[2].isdigit():
        return ""
    moment = dt.datetime.fromtimestamp(boot_unix_s + int(fields[2]) / 1e6, dt.timezone.utc)
    first = text.split("\n", 1)[0]  # KEY=value lines of the device follow
    return f"{moment:%Y-%m-%d %H:%M:%S} {first}"


def _kmsg() -> list[str]:
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    lines: list[str] = []
    size = 0
    descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while size < _MAX_KMSG_BYTES:
            try:
                record = os.read(descriptor, 8192)
            except BlockingIOError:
                break  # the end
            except BrokenPipeError:
                continue  # overwritten while reading: the next read continues after the gap
            size += len(record)
            lines.append(parse_kmsg(record.decode("utf-8", "replace"), boot))
    finally:
        os.close(descriptor)
    return lines


def _journal(deadline_s: float, denied: Exception) -> list[str]:
    reason = getattr(denied, "strerror", None) or str(denied)
    remedy = "run as root, or sysctl kernel.dmesg_restrict=0"
    program = shutil.which("journalctl")
    if not program:
        raise CaptureError(f"/dev/kmsg: {reason}", remedy)
    argv = [program, "-k", "-n", "5000", "--no-pager", "-q", "-o", "short-iso"]
    output = command.run(argv, deadline_s=max(0.1, deadline_s))
    if output.timed_out or output.returncode != 0 or not output.stdout.strip():
        raise CaptureError(f"/dev/kmsg: {reason}; journalctl -k shows nothing", remedy)
    return output.stdout.decode("utf-8", "replace").splitlines()


def _visible(line: bytes) -> str:
    text = line.decode("utf-8", "replace").rstrip("\r")
    return text.rsplit("\r", 1)[-1]
