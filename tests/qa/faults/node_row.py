"""A row of the fault matrix for nodes: one fault on one node of a job of several, and the check of the promise.

Node 0 hosts the store of torchrun's agents and leads: the others start once its safelaunch has registered there. Node n
has the rank n. In a hang, rank ``CULPRIT`` hangs.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from safelaunch.job.process import ProcessId, identify
from safelaunch.supervise.cluster.store import Address, NodeStoreError, StoreClient
from tests.qa.faults.row import Outcome, own_faults
from tests.qa.faults.scene import (
    FAST_S,
    HOLDING,
    POLL_S,
    STEERED,
    TRAINING,
    Kind,
    Scene,
    Setting,
    let_the_copy_go_on,
    wait_for,
)
from tests.support import netns
from tests.support.jobs import Bundle, Result

Moment = Literal["start", "training", "suspicion", "capture", "publishing", "ending"]
HANGS: tuple[Moment, ...] = ("suspicion", "capture", "publishing", "ending")
CULPRIT = 1
PORT = 29400
HUNG = 124
TOGETHER = "together with"
WAKES_S = 60.0  # for a node that was stopped to notice what has become of the job
PATIENCE_S = 150.0


@dataclass(frozen=True)
class Promise:
    """Conditions at the end, in addition to those that ``judge`` checks in every row.

    Attributes:
        trains: The job continues, and every rank trains to its end. Otherwise, it ends with a nonzero exit code on
            every node.
        hangs: It ends with 124 and one verdict on all nodes that have begun it.
        named: Ranks that verdicts are allowed to name.
        surely: At least one verdict names one of them.
        nodes: Nodes that verdicts are allowed to name.
        told: Nodes that must have a bundle.
        lost: Nodes that are gone, about which nothing is promised.
    """

    trains: bool = False
    hangs: bool = False
    named: frozenset[int] = frozenset()
    surely: bool = False
    nodes: frozenset[int] = frozenset()
    told: frozenset[int] = frozenset()
    lost: frozenset[int] = frozenset()


class NodeScene(Scene):
    """The processes of one node."""

    def rank(self, number: int = 0) -> int | None:
        """Returns the first rank of this node, whatever its number."""
        ranks = self.job.ranks()
        return ranks[min(ranks)] if ranks else None

    def everything(self) -> list[ProcessId]:
        """Returns all processes of this node that live."""
        found = (identify(pid) for pid in (self.pid, *self.job.pids()))
        return [process for process in found if process is not None and process.is_alive()]


@dataclass(frozen=True)
class _Words(Kind):
    """A job whose words are all given by its setting."""

    def words(self, setting: Setting) -> list[str | Path]:
        return list(setting.words)


@dataclass(frozen=True)
class NodeRow:
    """One row. ``inject`` is the fault at ``moment``, on the node ``where`` if it hits one.

    Attributes:
        own: Further options on all nodes.
        loading: With DataLoader workers.
        nodes: Number of nodes that start; a row can start more.
        skew_s: How far the clocks of node 1 are ahead.
        static: The agents meet without c10d's rendezvous, which compares wall clocks.
        slow: Delay and loss of node 1's link.
        arrange: A context around each node.
    """

    fault: str
    moment: str
    promise: Promise
    inject: Callable[[Nodes], None]
    where: str = "-"
    own: tuple[str, ...] = ()
    max_stall_s: float = 60.0
    loading: bool = False
    nodes: int = 2
    nnodes: str = "2"
    skew_s: int = 0
    static: bool = False
    slow: tuple[float, float] | None = None
    arrange: Callable[[int, Setting], AbstractContextManager[object]] = field(default=lambda number, _: nullcontext())

    @property
    def name(self) -> str:
        return f"{self.fault}, {self.moment}, {self.where}"


class Nodes:
    """The job of a row: its network, and a scene for each node."""

    def __init__(self, row: NodeRow, scratch: Path, network: netns.Network, stack: ExitStack) -> None:
        self.row = row
        self.scratch = scratch
        self.network = network
        self._stack = stack
        self.scenes: list[NodeScene] = []
        self.stopped: list[ProcessId] = []  # continued when all else has ended
        self.start()
        if row.nodes > 1:
            self.until(self._is_registered, "the first node to register")
        while len(self.scenes) < row.nodes:
            self.start()

    def start(self) -> NodeScene:
        """Starts the next node."""
        row, number = self.row, len(self.scenes)
        place = self.scratch / netns.host(number)
        place.mkdir()
        python = HOLDING if row.moment == "publishing" else (sys.executable, "-m", "safelaunch")
        skewed = number == 1 and row.skew_s
        entering = self.network.enter(number, ahead_s=row.skew_s if skewed else 0)
        setting = Setting(place, interpreter=(*entering, *python))
        setting.env |= {"GLOO_SOCKET_IFNAME": netns.DEVICE}
        # Before the first step it is another limit that ends a job.
        early = row.moment == "start" and not row.promise.trains
        setting.words = (
            "--stall-timeout=3",
            f"--max-stall={row.max_stall_s:g}",
            *(["--startup-timeout=20", "--rdzv-conf=join_timeout=30,read_timeout=20"] if early else []),
            f"--nnodes={row.nnodes}",
            *netns.meeting(number, PORT, static=row.static),
            "--nproc-per-node=1",
            *row.own,
            os.fspath(STEERED),
            f"--culprit={CULPRIT}",
            f"--scratch={self.scratch}",
            *(["--workers=1"] if row.loading else []),
        )
        self._stack.enter_context(row.arrange(number, setting))
        scene = NodeScene(_Words(TRAINING.name, ranks=1), setting)
        self._stack.enter_context(scene.job)
        self.scenes.append(scene)
        return scene

    def _is_registered(self) -> bool:
        """Returns whether a safelaunch has counted itself in the store of the agents."""
        address = Address(netns.address(0), PORT)

        def asked() -> bool:
            try:
                store = StoreClient(address, deadline_s=5.0)
            except NodeStoreError:
                return False
            try:
                return store.get(f"{self._prefix}/n", deadline_s=5.0) is not None
            except NodeStoreError:
                return False
            finally:
                store.close()

        return self.network.on(0, asked)

    @property
    def _prefix(self) -> str:
        import hashlib

        return f"safelaunch/1/{hashlib.blake2b(b'none', digest_size=8).hexdigest()}"

    def until(
        self, reached: Callable[[], object], what: str, *, patience_s: float = 60.0, poll_s: float = POLL_S
    ) -> None:
        wait_for(reached, what, self.remember, lambda: self.stderr, patience_s=patience_s, poll_s=poll_s)

    def remember(self) -> None:
        for scene in self.scenes:
            if scene.job.process.poll() is None:
                scene.remember()

    def pass_time(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= end, "time to pass", patience_s=seconds + 10.0)

    def steer(self, name: str) -> None:
        (self.scratch / name).touch()

    @property
    def stderr(self) -> str:
        return "\n".join(f"--- node {n}\n{scene.job.stderr}" for n, scene in enumerate(self.scenes))

    def trained(self, word: str) -> int:
        return len(list(self.scratch.glob(f"{word}-*")))

    def has_ended(self, number: int) -> bool:
        return self.scenes[number].job.process.poll() is not None


# --- moments ----------------------------------------------------------------------------------------------------------


def at_start(nodes: Nodes) -> None:
    """All of safelaunch's processes run. Ranks can run, but have made no step."""
    nodes.until(lambda: all(scene.guardian() and scene.agent() for scene in nodes.scenes), "guardians and agents")


def at_training(nodes: Nodes) -> None:
    """All ranks have made steps, and the nodes watch together."""
    nodes.until(lambda: nodes.trained("training") == len(nodes.scenes), "steps of all ranks")
    nodes.until(lambda: all(TOGETHER in scene.job.stderr for scene in nodes.scenes), "the nodes to meet")


def at_suspicion(nodes: Nodes) -> None:
    at_training(nodes)
    nodes.steer("hang")
    nodes.until(lambda: any(scene.watch_says() == "confirming" for scene in nodes.scenes), "a suspicion")


def at_capture(nodes: Nodes) -> None:
    at_training(nodes)
    nodes.steer("hang")
    nodes.until(lambda: all("collecting evidence" in scene.job.stderr for scene in nodes.scenes), "the capture")


def at_publishing(nodes: Nodes) -> None:
    """All copies of bundles have begun, and have stopped themselves (``HOLDING``)."""
    at_training(nodes)
    nodes.steer("hang")
    copies = [scene.wait_for(lambda scene=scene: scene.helper("copier.py"), "the copy") for scene in nodes.scenes]  # type: ignore[misc]
    nodes.until(lambda: all(copy.is_stopped() for copy in copies), "the copies to stop")


def at_ending(nodes: Nodes) -> None:
    """A node has published its bundle: the ranks are about to be ended."""
    at_training(nodes)
    nodes.steer("hang")
    nodes.until(lambda: any(scene.job.bundles() for scene in nodes.scenes), "a bundle", poll_s=FAST_S)


MOMENTS: dict[str, Callable[[Nodes], None]] = {
    "start": at_start,
    "training": at_training,
    "suspicion": at_suspicion,
    "capture": at_capture,
    "publishing": at_publishing,
    "ending": at_ending,
}


# --- a row ------------------------------------------------------------------------------------------------------------


def run(row: NodeRow, scratch: Path) -> Outcome:
    """Runs one row in the empty directory ``scratch``."""
    if skipped := netns.cannot():
        return Outcome(row, skipped=skipped)
    begin = time.monotonic()
    slow = {1: row.slow} if row.slow is not None else None
    most = int(row.nnodes.rpartition(":")[2])
    with netns.Network(most, scratch, slow=slow) as network, ExitStack() as stack:
        try:
            nodes = Nodes(row, scratch, network, stack)
            outcome = _through(row, nodes)
        except (AssertionError, OSError) as error:
            first, _, rest = str(error).partition("\n")
            outcome = Outcome(row, (first,), stderr=rest)
    return replace(outcome, seconds=time.monotonic() - begin)


def _through(row: NodeRow, nodes: Nodes) -> Outcome:
    if row.moment in MOMENTS:
        MOMENTS[row.moment](nodes)
    row.inject(nodes)
    for scene in nodes.scenes:
        let_the_copy_go_on(scene)
    if row.promise.trains:
        nodes.steer("finish")
    living = [n for n in range(len(nodes.scenes)) if n not in row.promise.lost]
    held = {process.pid for process in nodes.stopped}
    first = [n for n in living if nodes.scenes[n].pid not in held]
    nodes.until(lambda: all(map(nodes.has_ended, first)), f"the end on {_list(first)}", patience_s=PATIENCE_S)
    for process in nodes.stopped:
        process.send(signal.SIGCONT)
    nodes.until(lambda: all(map(nodes.has_ended, living)), f"the end on {_list(living)}", patience_s=WAKES_S)
    deadline = time.monotonic() + 30.0  # for guardians
    while any(_alive(nodes.scenes[n]) for n in living) and time.monotonic() < deadline:
        time.sleep(0.1)
    return judge(row, nodes, living)


def _alive(scene: NodeScene) -> list[str]:
    pids = {process.pid for process in scene.seen if process.is_alive()}
    return [f"pid {pid}" for pid in sorted(pids | set(scene.job.pids()))]


def _list(numbers: list[int]) -> str:
    return " and ".join(netns.host(number) for number in numbers)


def judge(row: NodeRow, nodes: Nodes, living: list[int]) -> Outcome:
    promise = row.promise
    results = {n: nodes.scenes[n].job.wait() for n in living}
    left = {n: sorted({*result.leftovers, *_alive(nodes.scenes[n])}) for n, result in results.items()}
    wrong = [f"left behind on {netns.host(n)}: {what}" for n, found in left.items() for what in found]
    for number, result in results.items():
        wrong += [f"{fault} on {netns.host(number)}" for fault in own_faults(result.stderr)]
        if promise.trains and result.code != 0:
            wrong.append(f"a healthy job was ended: exit code {result.code} on {netns.host(number)}")
        if promise.hangs and result.code != HUNG and number < row.nodes:
            wrong.append(f"exit code {result.code} on {netns.host(number)}, not {HUNG}")
        if not promise.trains and result.code == 0:
            wrong.append(f"exit code 0 on {netns.host(number)}")
    if promise.trains and nodes.trained("trained") != len(nodes.scenes):
        wrong.append(f"{nodes.trained('trained')} of {len(nodes.scenes)} ranks trained to their end")
    bundles = {n: [*result.bundles, *_kept_locally(nodes.scenes[n], result)] for n, result in results.items()}
    wrong += _of_verdicts(promise, bundles)
    told = promise.told | (frozenset(range(row.nodes)) if promise.hangs else frozenset())
    wrong += [f"no bundle on {netns.host(n)}" for n in living if n in told and not bundles[n]]
    local = [one for found in bundles.values() for one in found if nodes.scratch not in one.path.parents]
    shown = "/".join(str(len(found)) for found in bundles.values())
    codes = " ".join(str(result.code) for result in results.values())
    verdicts = [_short(bundle) for found in bundles.values() for bundle in found]
    verdict = ", ".join(dict.fromkeys(verdicts)) or "-"
    for bundle in local:
        shutil.rmtree(bundle.path)
    return Outcome(row, tuple(wrong), "", codes, sum(map(len, left.values())), shown, verdict, 0.0, nodes.stderr)


def _kept_locally(scene: NodeScene, result: Result) -> list[Bundle]:
    # Bundles of this node outside the requested directory, as safelaunch reported them.
    named = (Path(line.partition(": ")[2]) for line in result.said.splitlines() if line.startswith("bundle"))
    return [Bundle(path) for path in named if path.parent != scene.job.bundle_dir and path.is_dir()]


def _short(bundle: Bundle) -> str:
    verdict = bundle.verdict
    nodes = "".join(f" {one['host']}" for one in verdict.get("nodes", ()))
    return f"{verdict['outcome']}: {verdict['cause']} {[one['rank'] for one in verdict['culprits']]}{nodes}"


def _of_verdicts(promise: Promise, bundles: dict[int, list[Bundle]]) -> list[str]:
    """Every verdict names none but those at fault, and all nodes say the same, or that they do not know."""
    wrong = []
    said: list[dict[str, Any]] = []
    for number, found in bundles.items():
        for bundle in found:
            verdict = bundle.verdict
            # The common verdict points at files of the bundle that it names; another node's bundle has only its own
            # ranks.
            is_half = "bundle" in verdict and Path(verdict["bundle"]["path"]).name != bundle.path.name
            problems = [problem for problem in bundle.problems() if not (is_half and problem.startswith("the claim"))]
            wrong += [f"{problem} (bundle of {netns.host(number)})" for problem in problems]
            named = {one["rank"] for one in verdict["culprits"]}
            if not named <= promise.named:
                wrong.append(f"{netns.host(number)} names {sorted(named)}, not {sorted(promise.named)}")
            nodes = {one["host"] for one in verdict.get("nodes", ())}
            if not nodes <= set(map(netns.host, promise.nodes)):
                wrong.append(f"{netns.host(number)} names {' and '.join(sorted(nodes))}")
            if verdict["outcome"] == "hang":
                said.append({name: value for name, value in verdict.items() if name != "bundle"})
                if verdict.get("bundle") is None:
                    said[-1]["alone"] = number
    names = {
        rank for found in bundles.values() for one in found for rank in (c["rank"] for c in one.verdict["culprits"])
    }
    if promise.surely and not names:
        wrong.append("nobody is named")
    together = [verdict for verdict in said if "alone" not in verdict]
    if any(verdict != together[0] for verdict in together):
        wrong.append("the nodes have different verdicts")
    if promise.hangs and len(together) < len(said):
        wrong.append("a node has a different verdict")
    return wrong
