"""Measures a job of many nodes: its cost while nothing happens, and the time of a hang from suspicion to verdict.

    python -m scripts.bench nodes [--nodes 1024] [--ranks 8] [--entries 512] [--idle-s 30] [--json FILE]

The store is torch's, in a separate process. The clients are safelaunch's; one of them, in a separate process, leads.
torch's store looks up the name of each client that connects, and serves no other client during the lookup. With root,
this host's address gets a name, as in a cluster. Only the ranks don't exist: every node shows evidence of ``--ranks``
ranks, each with a stack of two looks and a Flight Recorder. Rank 0 sleeps, and all others wait for it in an all_reduce.
All nodes share this machine's cores, so the time of an incident includes what 1,024 machines would compute in parallel.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import IO

import msgspec
import psutil

from safelaunch.capture.flight_dump import parse_pickle
from safelaunch.model import Evidence, FlightRecord, RankEvidence
from safelaunch.supervise.cluster.channel import Channel
from safelaunch.supervise.cluster.evidence import SharedColumns, condense, unpack_evidence
from safelaunch.supervise.cluster.exchange import NO_SUBMISSIONS, PeerView
from safelaunch.supervise.cluster.merge import merge
from safelaunch.supervise.cluster.messages import Decision, NodeCard
from safelaunch.supervise.cluster.rendezvous import SharedStore
from safelaunch.supervise.cluster.store import Address
from safelaunch.verdict.diagnose import diagnose
from scripts.bench.diagnose import make
from scripts.bench.lib import ROOT, BenchError, Figure, environment, figure, progress, run_bench

PER_PROCESS = 128  # followers that share a process; the leader has a separate one
MEETING_S = 300.0
INCIDENT_S = 300.0
STORE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=8, help="ranks per node (8)")
    parser.add_argument("--entries", type=int, default=512, help="Flight Recorder entries per rank (512)")
    parser.add_argument("--idle-s", type=float, default=30.0, help="how long to watch while nothing happens (30)")
    parser.add_argument("--play", help=argparse.SUPPRESS)  # what a child plays: PORT,FIRST,COUNT
    options, _ = parser.parse_known_args()
    if options.play:
        return play(*map(int, options.play.split(",")), options)
    return run_bench("bench_nodes", parser, measure)


# --- the parent -------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> list[Figure]:
    with ExitStack() as stack:
        store = stack.enter_context(child([*with_names(), sys.executable, "-c", STORE]))
        port = answer(store, MEETING_S)
        progress(f"the leader, then {options.nodes - 1} nodes")
        leader = stack.enter_context(player(port, 0, 1, options))
        assert answer(leader, MEETING_S) == "ready"
        followers = []
        for first in range(1, options.nodes, PER_PROCESS):
            count = min(PER_PROCESS, options.nodes - first)
            followers.append(stack.enter_context(player(port, first, count, options)))
        for follower in followers:
            assert answer(follower, MEETING_S) == "ready"
        tell(leader, "wait")
        met = json.loads(answer(leader, MEETING_S))
        progress(f"all nodes have met; watching for {options.idle_s:g} s")
        store_cpu, leader_cpu = cpu_percent((store.pid, leader.pid), options.idle_s)
        progress("an incident")
        for process in (leader, *followers):
            tell(process, "suspect")
        ended = json.loads(answer(leader, INCIDENT_S))
        learned = [json.loads(answer(follower, INCIDENT_S)) for follower in followers]
    if ended["culprits"] != [0]:
        raise BenchError(f"the verdict names {ended['culprits']}, not rank 0")
    last_s = max(each["learned_s"] for each in learned) - ended["suspected_s"] if learned else 0.0
    world = options.nodes * options.ranks
    size = f"{options.nodes} nodes of {options.ranks} ranks"
    return [
        figure(f"{size}: CPU of the store's process while nothing happens", [store_cpu], "%", "<= 5"),
        figure("  CPU of the leader's supervisor", [leader_cpu], "%"),
        figure("  bytes of a round of one node (beat up, page down)", [met["round_bytes"]], "B"),
        figure("suspicion to verdict", [ended["decided_s"] - ended["suspected_s"]], "s", "<= 60"),
        figure("  to the evidence of all", [ended["complete_s"] - ended["suspected_s"]], "s"),
        figure("  until the last node knows it", [last_s], "s"),
        figure("  memory of the leader at its peak", [ended["peak_mb"]], "MB", "<= 1000"),
        figure("  bytes of evidence through the store, per rank", [ended["evidence_bytes"] / world], "B"),
    ]


def with_names() -> list[str]:
    """Returns a command prefix under which this host's name resolves without a query; empty without root."""
    if os.geteuid() or not shutil.which("unshare"):
        progress("without root, the store may wait for the name of each client")
        return []
    hosts = Path("hosts").resolve()
    hosts.write_text("127.0.0.1 localhost\n::ffff:127.0.0.1 localhost\n")
    script = 'mount --bind "$0" /etc/hosts && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, os.fspath(hosts)]


@contextmanager
def child(argv: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        argv, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def player(
    port: int, first: int, count: int, options: argparse.Namespace
) -> AbstractContextManager[subprocess.Popen[str]]:
    words = [f"--{name}={getattr(options, name)}" for name in ("nodes", "ranks", "entries")]
    return child([sys.executable, "-m", "scripts.bench.nodes", f"--play={port},{first},{count}", *words])


def answer(process: subprocess.Popen[str], timeout_s: float) -> str:
    """The next line that a child prints. Raises BenchError if it ends or is late."""
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    try:
        line = _out(process).readline().strip()
    finally:
        timer.cancel()
    if not line:
        raise BenchError(
            f"a process of the benchmark ended early ({process.wait()}), or took longer than {timeout_s:g} s"
        )
    return line


def tell(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(word + "\n")
    process.stdin.flush()


def _out(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def cpu_percent(pids: Sequence[int], seconds: float) -> list[float]:
    """The CPU time of each process, in percent of a core."""

    def spent() -> list[float]:
        times = [psutil.Process(pid).cpu_times() for pid in pids]
        return [each.user + each.system for each in times]

    before = spent()
    time.sleep(seconds)
    return [100 * (after - first) / seconds for first, after in zip(before, spent(), strict=True)]


# --- a child: one supervisor, or many ---------------------------------------------------------------------------------


def play(port: int, first: int, count: int, options: argparse.Namespace) -> int:
    world = options.nodes * options.ranks
    make_node = maker(options.ranks, options.entries, world)
    meeting = SharedStore(Address("127.0.0.1", int(port)), "safelaunch/bench")
    chunks = {number: condense(make_node(number)) for number in range(first, first + count)}
    channels = {}
    for number in chunks:
        channel = Channel(NodeCard("", f"node{number}", os.getpid(), "0", "2"))
        ranks = tuple(range(number * options.ranks, (number + 1) * options.ranks))
        channel.update(ranks=ranks, world=world)
        channel.start(meeting)
        channels[number] = channel
    until(lambda: all(channel.view.page is not None for channel in channels.values()), MEETING_S)
    print("ready", flush=True)
    if first == 0:
        assert sys.stdin.readline().strip() == "wait"
        until(lambda: covered(channels[0].view), MEETING_S)
        print(json.dumps({"round_bytes": round_bytes(channels[0])}), flush=True)
    assert sys.stdin.readline().strip() == "suspect"
    if first == 0:
        print(json.dumps(lead(channels[0], chunks[0], make_node(0))), flush=True)
    else:
        print(json.dumps({"learned_s": follow(channels, chunks)}), flush=True)
    time.sleep(INCIDENT_S)
    return 0


def until(condition: Callable[[], object], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise BenchError(f"waited {timeout_s:g} s")
        time.sleep(0.05)


def covered(seen: PeerView) -> bool:
    return seen.page is not None and seen.page.covered


def lead(channel: Channel, chunks: list[bytes], own: Evidence) -> dict[str, object]:
    """The leader's part, as ``supervise/rounds.py`` does it."""
    begin = time.monotonic()
    channel.update(doing="suspecting", suspects=0)
    take_part(channel, chunks)
    channel.gather("hang.1")
    until(lambda: channel.view.submissions.get("hang.1", NO_SUBMISSIONS).is_complete, INCIDENT_S)
    complete = time.monotonic()
    shared = SharedColumns()
    gathered = channel.view.submissions["hang.1"].chunks.values()
    evidence = [unpack_evidence(each, shared)[0] for each in gathered]
    sizes = sum(len(chunk) for each in (*gathered, chunks) for chunk in each)
    verdict = diagnose(merge(own, evidence))
    channel.decide("hang.1", Decision(verdict, "kill", "node0", "/bundle"))
    until(lambda: channel.view.decisions, INCIDENT_S)
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "suspected_s": begin,
        "complete_s": complete,
        "decided_s": time.monotonic(),
        "culprits": [culprit.rank for culprit in verdict.culprits],
        "evidence_bytes": sizes,
        "peak_mb": peak_kb / 1024,
    }


def take_part(channel: Channel, chunks: list[bytes]) -> None:
    """Looks, votes, and hands its evidence in."""
    until(lambda: (page := channel.view.page) is not None and page.incident == 1, INCIDENT_S)
    channel.update(incident=1, vote="unknown")
    until(lambda: (page := channel.view.page) is not None and page.phase == "collecting", INCIDENT_S)
    channel.submit("hang.1", chunks)


def follow(channels: dict[int, Channel], chunks: dict[int, list[bytes]]) -> float:
    """Returns the time (CLOCK_MONOTONIC, of this machine) at which the last of these nodes knew the decision."""
    todo = dict.fromkeys(channels, "look")
    while todo:
        for number, step in list(todo.items()):
            channel, page = channels[number], channels[number].view.page
            if step == "look" and page is not None and page.incident == 1:
                channel.update(incident=1, vote="unknown")
                todo[number] = "collect"
            elif step == "collect" and page is not None and page.phase == "collecting":
                channel.submit("hang.1", chunks[number])
                todo[number] = "learn"
            elif step == "learn" and channel.view.decisions:
                channel.update(agrees=True)
                del todo[number]
        time.sleep(0.05)
    return time.monotonic()


def round_bytes(channel: Channel) -> int:
    beat, page = channel.beat, channel.view.page
    return len(msgspec.msgpack.encode(beat)) + len(msgspec.msgpack.encode(page))


def maker(ranks: int, entries: int, world: int) -> Callable[[int], Evidence]:
    """Returns a function from a node's number to its evidence."""
    from tests.support.evidence import in_c10d, in_user, rank

    def record(*, odd: bool) -> FlightRecord:
        dump = make(0, world, entries)
        if odd:  # it has not come to the last call
            dump["entries"] = dump["entries"][:-1]  # type: ignore[index]
        return parse_pickle(pickle.dumps(dump, protocol=2))

    waiting, asleep = record(odd=False), record(odd=True)

    def of(number: int) -> Evidence:
        found: list[RankEvidence] = []
        for each in range(number * ranks, (number + 1) * ranks):
            if each == 0:
                found.append(rank(0, in_user(50), "sleep", flight=asleep))
            else:
                found.append(rank(each, in_c10d("all_reduce", 50), flight=waiting))
        there = {each.rank for each in found}
        missing = tuple(n for n in range(world) if n not in there)
        return Evidence("hang", world, tuple(found), missing_ranks=missing, stall_s=60.0)

    return of


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="bench") as place:
        os.chdir(place)
        sys.exit(main())
