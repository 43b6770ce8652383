"""Reads kernel messages that might explain a hang or a killed rank."""

from __future__ import annotations

import datetime as dt
import os
import re
import shutil
import time
from collections.abc import Iterable, Sequence

from safelaunch.capture import command
from safelaunch.capture.result import Result, attempt, within
from safelaunch.system.errors import CaptureError

MAX_KERNEL_LINES = 200
NOTHING = "(nothing relevant)"
_MAX_KMSG_BYTES = 8 << 20

# Memory, GPUs, stuck tasks, storage, network, hardware.
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


def kernel_log(*, deadline_s: float = 3.0) -> Result[str]:
    """Returns the last kernel log lines that might explain a hang, newest last; never raises.

    Reads ``journalctl -k`` if ``/dev/kmsg`` is reserved for root (``kernel.dmesg_restrict``), as on many systems.
    """

    def read() -> str:
        begin = time.monotonic()
        try:
            lines = within(deadline_s / 2, "/dev/kmsg", _kmsg)
        except (OSError, CaptureError) as error:
            lines = _journal(deadline_s - (time.monotonic() - begin), error)
        matches = relevant(lines)
        return "\n".join(matches or [NOTHING]) + "\n"

    return attempt("kernel log", read)


def relevant(lines: Iterable[str]) -> list[str]:
    return [line for line in lines if _RELEVANT.search(line)][-MAX_KERNEL_LINES:]


def since(begun: str, lines: Sequence[str]) -> list[str]:
    """Drops messages from before ``begun``, the run's start in the log's format. Keeps lines without a time."""
    begun_s, times = _moment(begun), [_moment(line) for line in lines]
    return [line for line, at_s in zip(lines, times, strict=True) if line != NOTHING and not 0 < at_s < begun_s]


_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(Z|[+-]\d\d:?\d\d)?", re.ASCII)


def _moment(text: str) -> float:
    """Converts the time at the start of ``text`` to Unix seconds (UTC if it has no zone); 0 if there is no time."""
    match = _MOMENT.match(text)
    if match is None:
        return 0.0
    zone = (match[3] or "Z").replace("Z", "+0000").replace(":", "")
    try:
        return dt.datetime.strptime(f"{match[1]} {match[2]} {zone}", "%Y-%m-%d %H:%M:%S %z").timestamp()
    except (ValueError, OverflowError):
        return 0.0


def parse_kmsg(record: str, boot_unix_s: float) -> str:
    """Formats a record of ``/dev/kmsg`` (ABI/testing/dev-kmsg) as ``YYYY-MM-DD HH:MM:SS text``; ``""`` if damaged."""
    head, separator, text = record.partition(";")
    fields = head.split(",")
    if not separator or len(fields) < 3 or not fields[2].isdigit():
        return ""
    moment = dt.datetime.fromtimestamp(boot_unix_s + int(fields[2]) / 1e6, dt.timezone.utc)
    first = text.split("\n", 1)[0]  # the device's KEY=value lines follow
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
                continue  # overwritten during the read: the next read resumes after the gap
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
