"""The beacon in real ranks: it sees what they do, and they do not notice it."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from safelaunch.beacon import layout, output
from safelaunch.capture import worker_server
from safelaunch.capture.collect import ask_server
from safelaunch.capture.look import Target
from safelaunch.capture.pages import ProgressPage, Roster, read_meta
from safelaunch.job.paths import RunPaths
from tests.qa import zoo
from tests.support.jobs import Job, Result
from tests.support.paths import PROGRAMS

pytestmark = pytest.mark.torch

# What every script below begins with: its own page and their companions, and a way to tell the test what it saw.
PRELUDE = """
import json, os, sys
from pathlib import Path

RANK = os.environ["RANK"]
RUN_DIR = Path(os.environ["SAFELAUNCH_RUN_DIR"])
BASE = RUN_DIR / "pages" / f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{RANK}-{os.getpid()}"

def progress():
    from safelaunch.capture.pages import ProgressPage
    return ProgressPage(BASE).read()

def pages():  # of this rank
    names = (path.name for path in BASE.parent.iterdir() if "." not in path.name)
    return sorted(name for name in names if name.split("-")[1:2] == [RANK] and name.count("-") == 2)

def output(base=BASE):
    from safelaunch.beacon import output
    return [[stream, data.decode("latin-1")] for _, stream, data in output.read(str(base) + ".ring")]

def tell(**seen):
    with open(f"seen-{RANK}.json.partial", "w") as file:
        json.dump(seen, file)
    os.rename(f"seen-{RANK}.json.partial", f"seen-{RANK}.json")
"""
# Anything in the output that a script did not write itself.
NOISE = re.compile(r"Traceback|safelaunch|beacon|Server|Exception ignored|Warning|\[[WE]\d{4}")

Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts ``source`` as a job of its own, after the prelude; ``words`` are the launcher's options."""
    jobs: list[Job] = []

    def begin(source: str, *words: str, wrapper: str = "", env: dict[str, str | None] | None = None) -> Job:
        script = tmp_path / "script.py"
        script.write_text(PRELUDE + textwrap.dedent(source))
        command: list[str | Path] = [*words, script]
        if wrapper:
            shell = tmp_path / "wrapper.sh"
            shell.write_text(f'#!/bin/sh\n{textwrap.dedent(wrapper)}\nexec {sys.executable} -u "$@"\n')
            shell.chmod(0o755)
            command = ["--no-python", *words, shell, script]
        job = Job(command, tmp_path, env=env)
        jobs.append(job)
        return job

    yield begin
    for job in jobs:
        job.clean_up()


def seen(job: Job, rank: int = 0) -> dict[str, Any]:
    """What a rank told; waits for it."""
    path = job.scratch / f"seen-{rank}.json"
    job.until(path.exists, f"word from rank {rank}")
    return dict(json.loads(path.read_text()))


def run_dir(job: Job) -> RunPaths:
    (found,) = (job.runtime / "safelaunch").glob("r[0-9]*")
    return RunPaths(found)


def healthy(job: Job) -> Result:
    """The job has ended well, and nobody has noticed us."""
    result = job.wait()
    assert (result.code, result.bundles, result.leftovers) == (0, (), ()), result.stderr
    assert NOISE.search(result.stdout + result.stderr) is None, result.stdout + result.stderr
    return result


# --- what ranks do that nobody disturbs: one job, in which each rank runs a script of its own ------------------------

ONE_JOB = pytest.mark.xdist_group("beacon")


@dataclass(frozen=True)
class Parts:
    """``told``: by the name of the script."""

    place: Path
    result: Result
    told: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    place = tmp_path_factory.mktemp("parts")
    sources = {
        "steps": STEPS.replace("layout_max", str(layout.MAX_OPTIMIZERS)),
        "phases": PHASES,
        "forks": FORKS,
        "loaders": LOADERS,
        "output": OUTPUT,
        "closes": CLOSES,
    }
    for rank, source in enumerate(sources.values()):
        (place / f"rank{rank}.py").write_text(PRELUDE + textwrap.dedent(source))
    shell = place / "each.sh"
    shell.write_text(f"#!/bin/sh\nexec {sys.executable} -u rank$RANK.py\n")
    shell.chmod(0o755)
    # Without early looks: on a busy machine, a rank that forks may be quiet for seconds.
    with Job(["--no-early-look", f"--nproc-per-node={len(sources)}", "--no-python", shell], place) as job:
        result = job.wait()
        yield Parts(place, result, {name: seen(job, rank) for rank, name in enumerate(sources)})


@ONE_JOB
def test_nobody_notices(parts: Parts) -> None:
    result = parts.result
    assert (result.code, result.bundles, result.leftovers) == (0, (), ()), result.stderr
    # Python's own resource tracker now and then warns of a leaked semaphore, without us as well.
    said = [line for line in (result.stdout + result.stderr).splitlines() if "leaked" not in line]
    assert NOISE.search("\n".join(said)) is None, said
    assert not [name for name, told in parts.told.items() if told.get("log")], "the beacon has met no fault"


# --- steps ------------------------------------------------------------------------------------------------------------

STEPS = """
    import torch, safelaunch

    counted = {}

    def model():
        return torch.nn.Linear(2, 1)

    def loop(name, *optimizers, steps, step=lambda o: o.step()):
        before = progress().optimizer_steps
        for _ in range(steps):
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = torch.ones_like(parameter)
                step(optimizer)
        after = progress().optimizer_steps
        kept.extend(optimizers)  # an optimizer that is gone may leave its identity to the next
        counted[name] = list(after[len(before):])
        assert after[: len(before)] == before

    kept = []
    sgd = lambda **more: torch.optim.SGD(model().parameters(), lr=0.1, **more)
    adam = lambda **more: torch.optim.AdamW(model().parameters(), lr=0.1, **more)
    never = progress().step, progress().first_step_ns

    loop("plain", sgd(), steps=10)
    loop("two", sgd(), adam(), steps=10)
    loop("foreach", adam(foreach=True), steps=10)
    loop("fused", adam(fused=True), steps=10)

    class Mine(torch.optim.Adagrad):  # a class that nothing above has used: torch counts each level that it has patched
        def step(self, closure=None):
            return super().step(closure)
    loop("subclass", Mine(model().parameters(), lr=0.1), steps=10)

    def closure():
        loss = (net(torch.ones(1, 2)) ** 2).sum()
        loss.backward()
        return loss
    net = model()
    loop("lbfgs", torch.optim.LBFGS(net.parameters(), max_iter=3), steps=4, step=lambda o: o.step(closure))

    accumulating = sgd()
    before = progress().optimizer_steps
    for micro in range(10):
        net(torch.ones(1, 2)).sum().backward()
        if micro % 5 == 4:
            accumulating.step()
    counted["accumulation"] = list(progress().optimizer_steps[len(before):])

    scaler = torch.amp.GradScaler("cpu")
    scaled, before, skipped = sgd(), progress().optimizer_steps, 0
    for number in range(10):
        for parameter in scaled.param_groups[0]["params"]:
            parameter.grad = torch.full_like(parameter, float("inf") if number in (0, 3, 4, 8) else 1.0)
        scaler.scale(torch.ones(1))
        scaler.step(scaled)
        scaler.update()
    counted["scaler"] = list(progress().optimizer_steps[len(before):])

    scheduled = sgd()
    scheduler = torch.optim.lr_scheduler.StepLR(scheduled, 1)
    loop("scheduler", scheduled, steps=10, step=lambda o: (o.step(), scheduler.step()))

    total = len(progress().optimizer_steps)
    for number in range(layout_max + 8):
        loop(f"many {number}", sgd(), steps=2)
    before_user = progress()
    for _ in range(7):
        safelaunch.step()
    last = progress()
    tell(
        counted={k: v for k, v in counted.items() if not k.startswith("many")}, never=never, total=total,
        slots=len(last.optimizer_steps), many=[sum(v) for k, v in counted.items() if k.startswith("many")],
        step_before=before_user.step, step=last.step, steps=list(last.optimizer_steps),
        times=[last.claimed_ns, last.first_step_ns, before_user.last_step_ns, last.last_step_ns],
        log=(RUN_DIR / "beacon.log").exists(),
    )
"""


@ONE_JOB
def test_steps_of_every_kind_of_loop(parts: Parts) -> None:
    """Each optimizer has a count of its own; an unmodified loop is all it takes."""
    told = parts.told["steps"]
    assert told["never"] == [None, 0]
    assert told["counted"] == {
        "plain": [10],
        "two": [10, 10],
        "foreach": [10],
        "fused": [10],
        "subclass": [10],
        "lbfgs": [4],
        "accumulation": [2],
        "scaler": [6],
        "scheduler": [10],
    }
    room = layout.MAX_OPTIMIZERS - told["total"]
    assert told["slots"] == layout.MAX_OPTIMIZERS
    assert told["many"] == [2] * room + [0] * (layout.MAX_OPTIMIZERS + 8 - room), "past the last slot only time is kept"
    assert told["step_before"] == 10, "the optimizer that is furthest"
    assert told["step"] == 7, "safelaunch.step() speaks for itself"
    assert told["times"] == sorted(told["times"])
    assert len(set(told["times"])) == 4


@pytest.mark.nightly  # half a minute of CPU for inductor
def test_a_compiled_optimizer_step(start: Start) -> None:
    """With inductor: its compile workers are no ranks, and the compiled step counts like any other."""
    job = start("""
        import shutil, torch
        if shutil.which(os.environ.get("CXX", "g++")) is None:
            tell(skip="inductor needs a C++ compiler")
            sys.exit()
        net = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        step = torch.compile(optimizer.step)
        for _ in range(5):
            optimizer.zero_grad()
            net(torch.ones(1, 2)).sum().backward()
            step()
        tell(steps=list(progress().optimizer_steps), pages=pages(), me=BASE.name)
    """)
    told = seen(job)
    if "skip" in told:
        pytest.skip(told["skip"])
    result = job.wait()
    assert result.code == 0, result.stderr
    assert told["steps"] == [5]
    assert told["pages"] == [told["me"]]


def test_the_public_api_outside_a_run_does_nothing() -> None:
    source = """
        import sys, safelaunch
        safelaunch.step()
        with safelaunch.phase("eval", timeout=5), safelaunch.pause():
            safelaunch.step()
        try:
            with safelaunch.phase("eval"):
                raise KeyError("mine")
        except KeyError as error:
            print(error)
        print([name for name in sys.modules if name.endswith(("beacon.marks", "beacon.page")) or name == "torch"])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "'mine'\n[]\n", "")


PHASES = """
    import safelaunch
    seen, now = [], lambda: seen.append([progress().phase, progress().phase_timeout_s, progress().paused])
    now()
    with safelaunch.phase("eval", timeout=90):
        now()
        with safelaunch.phase("caf\\u00e9 " + "x" * 500):
            now()
            with safelaunch.pause():
                now()
                with safelaunch.pause():
                    now()
                now()
        now()
    now()
    began = progress().marked_ns
    with safelaunch.pause():
        entered = progress().marked_ns
    tell(seen=seen, moved=began < entered < progress().marked_ns, torch="torch" in sys.modules)
"""


@pytest.mark.nightly
@ONE_JOB
def test_phases_and_pauses(parts: Parts) -> None:
    told = parts.told["phases"]
    long = ("café " + "x" * 500).encode()[: layout.PHASE_MAX].decode()
    assert told["seen"] == [
        ["", 0, False],
        ["eval", 90, False],
        [long, 90, False],
        [long, 90, True],
        [long, 90, True],
        [long, 90, True],
        ["eval", 90, False],
        ["", 0, False],
    ]
    assert told["moved"], "entering and leaving a pause count as progress"
    assert not told["torch"], "a rank that never imports torch does not pay for it"


# --- what is there while it runs --------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_what_a_sleeping_rank_shows_to_the_outside(start: Start) -> None:
    """Claim, page, ring, meta, agent's events; the worker server answers while the rank sleeps."""
    job = start(
        """
        import time, torch.distributed as dist
        sys.stdout.write(f"rank {RANK} is up\\n")
        sys.stderr.write("careful\\n")
        dist.init_process_group("gloo")
        pair = dist.new_group([1, 0])
        try:
            raise ValueError("label 17 out of range")
        finally:
            tell(pid=os.getpid(), group=pair.group_name)
            time.sleep(1000)
        """,
        "--nproc-per-node=2",
    )
    told = [seen(job, rank) for rank in (0, 1)]
    pids = [one["pid"] for one in told]
    run = run_dir(job)
    assert stat.S_IMODE(run.root.stat().st_mode) == stat.S_IMODE(run.pages.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in run.pages.iterdir() if path.is_file())
    roster = Roster(run)
    events: list[str] = []
    job.until(
        lambda: events.extend(event.event for event in roster.refresh()) or "started" in events, "the agent's word"
    )
    assert events[-1] == "started"
    assert {rank: worker.pid for rank, worker in roster.workers.items()} == dict(enumerate(pids))
    pages = roster.pages()
    assert {rank: page.pid for rank, page in pages.items()} == dict(enumerate(pids))
    for rank, page in pages.items():
        progress = page.read()
        assert (progress.rank, progress.local_rank, progress.world_size, progress.attempt) == (rank, rank, 2, 0)
        assert (progress.state, progress.step, progress.exit_ns) == ("torch", None, 0)
        with open(f"/proc/{page.pid}/stat", "rb") as file:
            assert progress.start_ticks == int(file.read().rpartition(b")")[2].split()[19])
        assert page.server_up
        socket = os.fspath(roster.companion(page, layout.SERVER_SUFFIX))
        worker_server.post(socket, "ping", deadline_s=60.0)
        # without handlers of our own (torch 2.6, 2.9) nobody can ask for the GIL, and of NCCL's collectives only
        handler = "fr_trace_json" if zoo.takes_handlers() else "dump_nccl_trace_json"
        assert b'"version"' in worker_server.post(socket, handler, deadline_s=60.0)
        gil = worker_server.gil_test(socket, deadline_s=60.0)
        assert (gil.ping, gil.python) == (True, True if zoo.takes_handlers() else None)
        if zoo.takes_handlers():
            (handled,) = gil.handling
            assert (handled.type, handled.message) == ("ValueError", "label 17 out of range")
            assert handled.frames[0].file.endswith("script.py")
            assert (
                gil.groups == {"0": (0, 1), told[rank]["group"]: (0, 1)}
                and gil.groups_made == 2
                and not gil.foreign_backend
            )
        records = output.read(os.fspath(roster.companion(page, layout.RING_SUFFIX)))
        assert [(stream, data) for _, stream, data in records] == [
            (output.STDOUT, f"rank {rank} is up\n".encode()),
            (output.STDERR, b"careful\n"),
        ]
        assert all(abs(time.time_ns() - when) < 600e9 for when, _, _ in records)
        meta = read_meta(roster.companion(page, layout.META_SUFFIX))
        assert meta.argv[1:] == ("-u", os.fspath(job.scratch / "script.py"))
        assert meta.cwd == os.fspath(job.scratch)
        assert any("site-packages" in root for root in meta.code_roots)
    fault = roster.companion(pages[0], layout.FAULT_SUFFIX).open()
    os.kill(pids[0], signal.SIGTERM)
    result = job.wait()
    assert result.code == 1
    assert 'script.py", line' in fault.read(), "a rank that is terminated leaves its stack"
    fault.close()


def test_an_exception_and_the_way_out(start: Start) -> None:
    """Recorded before the script's own exit handlers run; the rank's end after them."""
    job = start("""
        import atexit, time
        tell(pid=os.getpid())
        while not os.path.exists("go"):
            time.sleep(0.01)

        class Unprintable(Exception):
            def __str__(self):
                raise RuntimeError("no text for you")

        def report():
            record = json.loads(Path(str(BASE) + ".exception").read_text())
            print(json.dumps([record, progress().state, progress().exit_ns]), flush=True)
        atexit.register(report)

        def inner():
            raise Unprintable from ValueError("the cause")
        inner()
    """)
    seen(job)
    (page,) = (ProgressPage(path) for path in run_dir(job).pages.iterdir() if layout.parse_page_name(path.name))
    (job.scratch / "go").touch()
    result = job.wait()
    assert result.code == 1
    record, state, exit_ns = json.loads(result.stdout)
    assert (state, exit_ns) == ("exception", 0)
    assert record["type"] == "__main__.Unprintable"
    assert "unprintable" in record["message"]
    assert [frame["function"] for frame in record["frames"]] == ["inner", "<module>"]
    assert record["frames"][0]["file"] == os.fspath(job.scratch / "script.py")
    assert "ValueError: the cause" in record["text"]
    assert abs(record["time_unix_s"] - time.time()) < 600
    after = page.read()
    assert after.state == "exited"
    assert after.claimed_ns < after.exception_ns < after.exit_ns
    assert "ValueError: the cause" in result.stderr
    assert "no text for you" not in result.stderr


# What a rank does → its state afterwards, and whether it recorded an exception.
ENDINGS = {
    "the end of the script": ("", "exited", False),
    "sys.exit": ("sys.exit(3)", "exited", False),
    "os._exit": ("os._exit(0)", "started", False),
    "an interrupt": ("raise KeyboardInterrupt", "exited", False),
    "an excepthook of its own": ("sys.excepthook = lambda *_: None; raise KeyError", "exited", True),
    "an excepthook that chains": ("h = sys.excepthook; sys.excepthook = lambda *a: h(*a); 1 / 0", "exited", True),
    "an exception in a thread": (
        "import threading; t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()", "exited", False,
    ),
}  # fmt: skip


def test_endings(start: Start) -> None:
    """Every way out, one rank each. They ignore SIGTERM, or the first failure would end the others."""
    statements = [statement for statement, _, _ in ENDINGS.values()]
    job = start(
        f"""
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        tell(pid=os.getpid())
        while not os.path.exists("go"):
            time.sleep(0.01)
        exec({statements!r}[int(RANK)])
        """,
        f"--nproc-per-node={len(statements)}",
    )
    for rank in range(len(statements)):
        seen(job, rank)
    files = [path for path in run_dir(job).pages.iterdir() if layout.parse_page_name(path.name)]
    pages = {page.read().rank: page for page in map(ProgressPage, files)}
    (job.scratch / "go").touch()
    assert job.wait().code == 1
    ended = {name: pages[rank].read() for rank, name in enumerate(ENDINGS)}
    assert {name: (p.state, p.exception_ns > 0) for name, p in ended.items()} == {
        name: (state, raised) for name, (_, state, raised) in ENDINGS.items()
    }


# --- forks and spawns -------------------------------------------------------------------------------------------------


FORKS = """
    import faulthandler, signal, time, torch
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    optimizer.step()
    sys.stdout.write("parent\\n")
    base, before = BASE, progress()

    def fork(work):
        child = os.fork()
        if child == 0:
            work()
            sys.exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def act():
        for _ in range(5):
            optimizer.step()
        import safelaunch
        safelaunch.step()
        sys.stdout.write("child\\n")

    def boom():
        sys.stderr = open("child-stderr", "w")
        raise ValueError("in the child")

    def wait():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1000)

    codes = [fork(lambda: None), fork(lambda: sys.exit(5)), fork(act), fork(boom), fork(wait)]
    after, size = progress(), os.path.getsize(str(BASE) + ".fault")
    optimizer.step()
    tell(
        codes=codes, same=before == after, fault=size, pages=pages(), me=BASE.name, output=output(),
        exception=os.path.exists(str(BASE) + ".exception"), steps=list(progress().optimizer_steps),
        log=(RUN_DIR / "beacon.log").exists(),
    )
"""


@ONE_JOB
def test_forked_children_let_go(parts: Parts) -> None:
    """A child that ends by sys.exit, one that raises, one that is terminated, one that steps and prints."""
    told = parts.told["forks"]
    assert told["codes"] == [0, 5, 0, 1, -signal.SIGTERM]
    assert told["same"], "nothing that a child does counts as the rank's"
    assert told["fault"] == 0
    assert told["pages"] == [told["me"]]
    assert told["output"] == [[output.STDOUT, "parent\n"]]
    assert not told["exception"]
    assert told["steps"] == [2]
    assert [parts.result.stdout.splitlines().count(word) for word in ("child", "parent")] == [1, 1]
    assert "ValueError: in the child" in (parts.place / "child-stderr").read_text()


LOADERS = """
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Look(Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, index):
            beacon = sorted(name for name in sys.modules if "beacon" in name)
            return json.dumps([os.getpid(), os.environ.get("PYTHONPATH"), len(beacon)])

    if __name__ == "__main__":
        found = {}
        for method in ("fork", "spawn"):
            loader = DataLoader(Look(), batch_size=None, num_workers=2, multiprocessing_context=method)
            found[method] = [json.loads(item) for item in loader]
        tell(found=found, pages=pages(), me=BASE.name, log=(RUN_DIR / "beacon.log").exists())
"""


@pytest.mark.nightly
@ONE_JOB
def test_loader_workers(parts: Parts) -> None:
    """Forked and spawned ones: no pages, no beacon, no trace; a rank that forks is still itself."""
    told = parts.told["loaders"]
    assert all(len({pid for pid, _, _ in found}) == 2 for found in told["found"].values())
    assert all(path is None for found in told["found"].values() for _, path, _ in found)
    assert {beacon for _, _, beacon in told["found"]["spawn"]} == {0}
    assert told["pages"] == [told["me"]]


@pytest.mark.nightly
def test_who_the_rank_is(start: Start) -> None:
    """A wrapper that runs a helper Python first, which looks like the rank: the process that steps is."""
    job = start(
        """
        import safelaunch, time
        safelaunch.step()
        # a subprocess, and what a subprocess starts, stay asleep
        import subprocess
        inside = subprocess.run([sys.executable, "-c", "import sys; print([n for n in sys.modules if 'beacon' in n])"],
            capture_output=True, text=True)
        from safelaunch.job.paths import RunPaths
        from safelaunch.capture.pages import Roster
        roster = Roster(RunPaths(RUN_DIR))
        roster.refresh()
        tell(pages=pages(), me=os.getpid(), chosen={rank: page.pid for rank, page in roster.pages().items()},
            inside=inside.stdout, path=os.environ.get("PYTHONPATH"))
        """,
        wrapper=f"{sys.executable} -c 'print(42)' >/dev/null",
        env={"PYTHONPATH": None},
    )
    told = seen(job)
    healthy(job)
    assert told["chosen"] == {"0": told["me"]}
    assert 1 <= len(told["pages"]) <= 2
    assert told["inside"] == "[]\n"
    assert told["path"] is None


@pytest.mark.nightly
def test_run_path_and_module(start: Start) -> None:
    """The spawned child of --run-path learns its rank late."""
    source = """
        import torch
        optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
        for _ in range(3):
            optimizer.step()
        seen = progress()
        tell(steps=list(seen.optimizer_steps), rank=seen.rank, pages=pages(), server=Path(str(BASE) + ".sock").exists())
    """
    job = start(source, "--run-path", "--nproc-per-node=2")
    told = [seen(job, rank) for rank in (0, 1)]
    result = job.wait()
    assert result.code == 0, result.stderr
    assert NOISE.search(result.stdout) is None
    assert [(t["steps"], t["rank"], t["server"]) for t in told] == [([3], 0, True), ([3], 1, True)]
    assert all(len(t["pages"]) <= 2 for t in told)


# --- streams ----------------------------------------------------------------------------------------------------------


OUTPUT = """
    import contextlib, io, logging, os, threading
    def bar():
        for done in range(3):
            sys.stderr.write(f"\\r{done}/2")
            sys.stderr.flush()
        sys.stderr.write("\\n")
    bar()
    with contextlib.redirect_stdout(io.StringIO()) as apart:
        print("not on the screen")
    os.write(1, b"by descriptor\\n")
    sys.stdout.buffer.write(b"\\xff\\xfe\\n")
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    logging.warning("logged")
    threads = [threading.Thread(target=sys.stdout.write, args=(f"thread {n}\\n",)) for n in range(20)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    real, sys.stdout = sys.stdout, open("replaced.txt", "w")
    print("into a file")
    sys.stdout.close()
    sys.stdout = real
    saved = os.dup(1)
    os.dup2(os.open("elsewhere", os.O_WRONLY | os.O_CREAT, 0o600), 1)
    sys.stdout.write("by the old name\\n")
    os.dup2(saved, 1)
    tell(output=output(), log=(RUN_DIR / "beacon.log").exists())
    sys.stdout.close()
    sys.stdout = open(os.devnull, "w")
"""


@pytest.mark.nightly
@ONE_JOB
def test_what_is_kept_of_the_output(parts: Parts) -> None:
    """The ring has what went through Python's streams to the descriptors, and nothing else."""
    told = parts.told["output"]
    out = "".join(text for stream, text in told["output"] if stream == output.STDOUT)
    err = "".join(text for stream, text in told["output"] if stream == output.STDERR)
    assert err == "\r0/2\r1/2\r2/2\n"
    lines = out.splitlines()
    assert lines[:2] == ["\xff\xfe", "logged"]
    assert lines[-1] == "by the old name"
    assert set(lines[2:-1]) <= {f"thread {n}" for n in range(20)}
    assert len(lines[2:-1]) >= 18, "two threads at once: one may be left out of the ring, never out of the output"
    assert sorted(line for line in parts.result.stdout.splitlines() if "thread" in line) == sorted(
        f"thread {n}" for n in range(20)
    )
    assert (parts.place / "elsewhere").read_text() == "by the old name\n"
    assert (parts.place / "replaced.txt").read_text() == "into a file\n"


CLOSES = """
    import atexit
    os.closerange(3, 1024)
    files = [open(f"file-{n}", "w") for n in range(300)]
    numbers = [file.fileno() for file in files]
    for file in files:
        file.write("still in the buffer")

    def alive(number):
        try:
            return os.fstat(number).st_size == 0
        except OSError:
            return False

    child = os.fork()
    if child == 0:
        os._exit(0 if all(map(alive, numbers)) else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    import safelaunch
    safelaunch.step()
    print("printed")
    before = progress().step
    tell(code=code, step=before, numbers=[min(numbers), max(numbers)], output=output())
    atexit.register(lambda: os._exit(0) if not all(map(alive, numbers)) else None)
    # the files are left to the interpreter's own end
"""


@pytest.mark.nightly
@ONE_JOB
def test_a_script_that_closes_what_it_did_not_open(parts: Parts) -> None:
    """As daemons do. Its own files get our numbers; none is closed under it, in the rank, in a child, or at the end."""
    told = parts.told["closes"]
    assert told["code"] == 0
    assert told["step"] == 1
    assert told["numbers"][0] < 10
    assert told["numbers"][1] > 240
    assert "".join(text for _, text in told["output"]) == "printed\n"
    assert "printed\n" in parts.result.stdout
    assert {(parts.place / f"file-{n}").read_text() for n in range(300)} == {"still in the buffer"}


# --- faults of ours, injected -----------------------------------------------------------------------------------------

UNCOMPILED = f"import torch; sys.path.append({str(PROGRAMS)!r}); import uncompiled"
SCRIPT = (
    f"    {UNCOMPILED}"
    + """
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    for _ in range(3):
        optimizer.step()
        sys.stdout.write("step\\n")  # in one piece
    import safelaunch
    safelaunch.step()
    with safelaunch.phase("eval"):
        pass
    if os.fork() == 0:
        sys.exit(0)
    os.wait()
    sys.stderr.write("the end\\n")
"""
)
# Once more where the supervisor has written into it meanwhile.
GONE = 'while [ -e "$SAFELAUNCH_RUN_DIR" ]; do rm -rf "$SAFELAUNCH_RUN_DIR" 2>/dev/null; done'
WRAPPERS = {
    "no run directory": GONE,
    "a file in place of the pages": 'rm -r "$SAFELAUNCH_RUN_DIR/pages"; : > "$SAFELAUNCH_RUN_DIR/pages"',
}
WRAPPERS_OF_ONE_RANK = {
    # in the shell's units, 512 bytes; torch 2.6 writes a file of its own, which fits
    "no room for a page": f"ulimit -f {layout.SIZE // 512 - 1}",
    "no room for a ring": "ulimit -f 64",
    "no name of it": "export SAFELAUNCH_RUN_DIR=",
    "a rank that is no number": "export RANK=zero",
    "no supervisor": "export SAFELAUNCH_SUPERVISOR_PID=none",
    "few descriptors": "ulimit -n 40",
}


@pytest.mark.nightly
@pytest.mark.parametrize("fault", WRAPPERS)
def test_a_fault_before_the_rank_starts(start: Start, fault: str) -> None:
    unharmed(start(SCRIPT, wrapper=WRAPPERS[fault]).wait(), 1)


@pytest.mark.nightly
def test_faults_of_single_ranks_before_they_start(start: Start) -> None:
    """Each rank has one of them."""
    cases = "\n".join(f"{rank}) {fault};;" for rank, fault in enumerate(WRAPPERS_OF_ONE_RANK.values()))
    job = start(SCRIPT, f"--nproc-per-node={len(WRAPPERS_OF_ONE_RANK)}", wrapper=f'case "$RANK" in\n{cases}\nesac')
    unharmed(job.wait(), len(WRAPPERS_OF_ONE_RANK))


def unharmed(result: Result, ranks: int) -> None:
    assert result.code == 0, result.stderr
    assert sorted(result.stdout.split()) == ["step"] * 3 * ranks
    assert [x for x in result.stderr.splitlines() if not x.startswith("safelaunch: ")] == ["the end"] * ranks


# In this order, one rank each, as they share a directory.
FAULTS = {
    "its modules are gone": "[sys.modules.pop(n) for n in list(sys.modules) if 'safelaunch_beacon' in n]",
    "its ring is damaged": (
        "f = open(str(BASE) + '.ring', 'r+b'); f.write(b'\\xff' * 4096); f.close();"
        "sys.stderr.write('x' * 70000 + '\\n')"
    ),
    "its page is damaged": "f = open(BASE, 'r+b'); f.write(b'\\xff' * 4096); f.close()",
    "its directory is removed": "import shutil; shutil.rmtree(RUN_DIR)",
    "its directory is a file": "RUN_DIR.touch()",
}
FAULTY = (
    f"    {UNCOMPILED}"
    + """
    import time, safelaunch
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    optimizer.step()
    while RANK != "0" and not os.path.exists(f"done-{int(RANK) - 1}"):
        time.sleep(0.01)
    exec(FAULTS[int(RANK)])
    for _ in range(3):
        optimizer.step()
        safelaunch.step()
        os.write(1, b"step\\n")
    for timeout in (0, None, "5m"):
        with safelaunch.phase("eval", timeout=timeout), safelaunch.pause():
            pass
    for timeout in (float("inf"), float("nan"), -1, "x"):
        try:
            safelaunch.phase("eval", timeout=timeout)
            raise SystemExit(f"{timeout!r} was accepted")
        except ValueError:
            pass
    if os.fork() == 0:
        sys.exit(0)
    os.wait()
    sys.stderr.write("the end\\n")
    open("done-" + RANK, "w").close()
"""
)


def test_faults_while_the_rank_runs(start: Start) -> None:
    """What the script prints and returns is what it would have been."""
    faults = repr(list(FAULTS.values()))
    job = start(FAULTY.replace("FAULTS", faults), f"--nproc-per-node={len(FAULTS)}", env={"OMP_NUM_THREADS": "1"})
    result = job.wait()
    assert result.code == 0, result.stderr
    assert result.stdout.split() == ["step"] * 3 * len(FAULTS)
    theirs = [line for line in result.stderr.splitlines() if not line.startswith("safelaunch: ")]
    assert sorted(theirs) == sorted([*["the end"] * len(FAULTS), "x" * 70000])


@pytest.mark.nightly
def test_a_fault_and_an_exception(start: Start) -> None:
    """With nowhere to record it, the exception is still the script's, told as Python tells it."""
    job = start("""
        import shutil
        shutil.rmtree(RUN_DIR)
        raise ValueError("mine")
    """)
    result = job.wait()
    assert result.code == 1
    own = [line for line in result.stderr.splitlines() if not line.startswith("safelaunch: ")]
    assert own[:2] == [
        "Traceback (most recent call last):",
        f'  File "{job.scratch / "script.py"}", line {PRELUDE.count(chr(10)) + 4}, in <module>',
    ]
    assert own[2:4] == ['    raise ValueError("mine")', "ValueError: mine"]
    assert "safelaunch_beacon" not in "\n".join(own)
    assert "safelaunch/beacon" not in "\n".join(own)


@pytest.mark.nightly
def test_ranks_that_end_while_they_are_asked(start: Start) -> None:
    """A handler that needs the GIL of an interpreter that has gone aborts the rank, whoever still waits for it."""
    job = start(
        """
        import ctypes, torch.distributed as dist
        dist.init_process_group("gloo")
        tell(pid=os.getpid())
        for _ in range(3):
            ctypes.PyDLL(None).usleep(600_000)  # with the GIL
        """,
        "--nproc-per-node=4",
    )
    for rank in range(4):
        seen(job, rank)
    roster = Roster(run_dir(job))

    def ask(page: ProgressPage) -> None:
        socket = roster.companion(page, layout.SERVER_SUFFIX)
        target = Target(page.rank, page.rank, page.pid, page.start_ticks, page.name, socket, page)
        while not page.exited_ns:
            ask_server(target, deadline_s=0.2)

    threads = [threading.Thread(target=ask, args=(page,)) for page in roster.pages().values() for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    healthy(job)
