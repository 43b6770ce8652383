"""How launchers, shells, clusters and the kernel report the end of a job's processes."""

from __future__ import annotations

import re
import signal

from safelaunch.addons.logs.heard import Heard, LoggedJob, RankEnd, local_label, of_shell, was_terminated
from safelaunch.addons.logs.launch_line import best_launch
from safelaunch.addons.logs.lines import LOCAL, MAX_RANKS, LogLine, Speaker, SpokenLine
from safelaunch.addons.logs.tracebacks import SIGNALS, OpenTraceback
from safelaunch.model import RankException, Rendezvous
from safelaunch.stacks import frames as fr
from safelaunch.verdict.exceptions import one_line
from safelaunch.verdict.exits import UNKNOWN_SIGNAL, signal_name

_MOST_COMMAND = 1 << 14
_REMARKS = re.compile(
    r"slurmstepd: error: \*\*\* ((?:JOB|STEP) .*)|(NVRM: Xid .*)|(.*GPU has fallen off the bus.*)"
    r"|error: (Detected \d+ oom[-_]kill event.*)|(Worker PID: \d+ Worker exit type: .*"
    r"|A worker died or was killed while executing task .*)|\.cuh?:\d+: .*(Assertion [`'].* failed)"
    r"|(Killing subprocess)(?= \d)"
)
_OF_WORLD = ("orld", "ORLD", "nproc", "num_processes", "NTASKS", " of ", "Starting with")
_WORLD = re.compile(
    r"(?:world[ _]size\W{1,4}|\branks? \d+ (?:of|out of) |\bnproc[-_]per[-_]node[= ]|\bnum_processes[= ]|SLURM_NTASKS="
    r"|registered. Starting with )(?P<world>\d{1,6})\b",
    re.IGNORECASE,
)

# --- torchrun, torch.multiprocessing, DeepSpeed -----------------------------------------------------------------------
# What arguments and configurations print of a job on several nodes.
_OF_NODES = ("nodes", "machines", "node_rank", "machine_rank")
_SEVERAL = re.compile(
    r"\b(?:(?:min|max)_nodes|nnodes|num_(?:nodes|machines))['\"]?\s*[:=]\s*(?!1\b)\d"
    r"|\b(?:node|machine)_rank['\"]?\s*[:=]\s*[1-9]"
)
OF_A_CHILD = re.compile(r"-- Process (?P<rank>\d{1,6}) terminated with the following error")
_FIELD = re.compile(r" {1,3}(?P<name>time|host|rank|exitcode|error_file|traceback) *: (?P<value>.*)")
_EXIT = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+) \(pid: (?P<pid>\d+)\)")
_LAUNCHER_PID = re.compile(r"[EW]\d{4} [\d:.]+ (?P<pid>\d+) ")
_KILLED_BY_LAUNCHER = re.compile(r"Unable to shutdown process (?P<pid>\d+) via")
_CLOSING = re.compile(r"Sending process (?P<pid>\d+) closing signal")
_RESTART = re.compile(r"will restart worker group|Restarting worker group")
_SPAWNED = re.compile(r"process (?P<rank>\d+) terminated with (?:signal (?P<signal>SIG\w+)|exit code (?P<code>\d+))")
# DeepSpeed names the command of its last process there, whichever has failed.
_DEEPSPEED = re.compile(r"launch\.py:\d+:sigkill_handler\].*exits with return code = (?P<code>-?\d+)")

# --- exceptions of launchers ------------------------------------------------------------------------------------------
_NOT_OF_A_RANK = ("ChildFailedError", "SignalException", "KeyboardInterrupt")
_LAUNCHERS = (
    "/torch/distributed/run.py", "/torch/distributed/launcher/api.py", "/horovod/runner/launch.py",
    "/ray/_private/worker.py",
)  # fmt: skip
_OF_A_PROGRAM = re.compile(r"Command '.{0,200}?(?:python|torchrun|accelerate|deepspeed)", re.IGNORECASE | re.DOTALL)
_STATUS_OF_A_PROGRAM = re.compile(r"died with <Signals\.(?P<name>SIG\w+)|exit status (?P<code>\d+)")
_SIGNALLED = re.compile(r"Process \d+ got signal: (?:Signals\.)?(?P<signal>\w+)")
_SENT_WHEN = {
    "SIGHUP": "which a terminal sends that closes, and which ends torchrun under nohup, too: tmux or setsid help",
    "SIGINT": "which Ctrl-C sends",
    "SIGTERM": "which a scheduler sends, or kill",
}
# c10d's store, of torchrun's agents or of the ranks, does not answer.
_OF_RENDEZVOUS = re.compile(
    r"(?:while trying to connect to|failed to connect to|Connection to) \(?\[?(?P<host>[\w.-]+)\]?"
    r"[,:]+ ?(?P<port>\d{2,5})"
)
_NOT_MET = re.compile(
    rf"{_OF_RENDEZVOUS.pattern}|store based barrier on rank|\b\d+/\d+ clients joined"
    r"|failed to listen on any local network"
)
_LISTENS = re.compile(r"failed to listen on any local network address.*port: (?P<port>\d+)")

# --- Lightning, Composer, mpirun, MPI, horovodrun ---------------------------------------------------------------------
_IN_WORDS = re.compile(
    r"(?:\[rank: |Rank |process rank )(?P<rank>\d{1,5})(?:\] Child process .{0,40}terminated with code "
    r"| crashed with exit code | .{0,80}exited on (?P<signal>signal) )(?P<code>-?\d+)"
    r"|MPI_ABORT was invoked on rank (?P<aborts>\d{1,5}) in communicator MPI_COMM_WORLD"
    r"|has exited due to process rank (?P<aborted>\d{1,5})\b"
)
_NAMED = re.compile(r"\s*Process name: (?:\[\[\d+,\d+\],)?(?P<rank>\d{1,6})\]?$")
_CODE = re.compile(r"\s*[Ee]xit [Cc]ode: +(?P<code>\d{1,3})$")  # of that, or of a container

# --- Slurm, Ray, Kubernetes, shells, the kernel -----------------------------------------------------------------------
# Launchers of clusters, and libraries that watch their processes, in all their wordings.
_DIED = re.compile(
    r"(?P<label>\b(?i:rank|task|process|worker|pid)\b)[ :=#]{1,2}\[?(?P<number>\d{1,9})\]?\)?[^\d\n]{0,60}?"
    r"(?:\b(?i:died|killed|terminated|exited|ended|failed|crashed|aborted|received|caught)\b)[^\d\n]{0,40}?"
    r"(?:(?:signal:? ?|SIG(?P<name>[A-Z]{3,4})\b|-(?=\d+\b))(?P<signal>\d{1,2})?"
    r"|(?:code|status):? ?\(?(?P<code>-?\d{1,3})\b)"
)
_TASK_ENDED = re.compile(
    r"srun: error: (?P<host>[\w.-]+): tasks? (?P<tasks>[\d,-]+): "
    r"(?:Exited with exit code (?P<code>\d+)|(?P<how>[A-Z][\w ]+))"
)
_CANCELLED = re.compile(r"\*\*\* (?:JOB .* CANCELLED|STEP .* CANCELLED .* DUE TO )")
_STOPPING = re.compile(r"srun: (?:Terminating |Force Terminated |Job step aborted)|\*\*\* (?:JOB|STEP) .* CANCELLED")
# Reports of a shell about its own child, of kubectl about a container, of Slurm about a step.
_KILLED = re.compile(
    r"(?:\S+: line \d+: +)?(?P<pid>\d+)? *(?P<how>Killed|Segmentation fault|Aborted|Bus error|Illegal instruction"
    r"|Floating point exception)(?: \(core dumped\))?(?:$| {2,})"
)
_OOM_KILLED = re.compile(r"\bOOM[ -]?Killed\b|Detected \d+ oom[-_]kill event", re.IGNORECASE)
_KERNEL_KILL = re.compile(r"(?:Out of memory|Memory cgroup out of memory): Killed process (?P<pid>\d+)")
# GPUs that are lost or broken; other numbers are mostly the application's own.
_XID = re.compile(r"NVRM: Xid \(.*\): (?P<number>48|79|94|95|119), pid='?(?P<pid>\d+)")
_RAY_MEMORY = re.compile(r"where the task \(.*\bpid=(?P<pid>\d+).* was (?:running|killed)")
_RAY_RANK = re.compile(r"(?:ip=(?P<ip>[\w.:]+), )?pid=(?P<pid>\d+)\)[^)\n]{0,40}world_rank=(?P<rank>\d{1,5})\b")
_RAY_OWN_RANK = re.compile(r"env:// \[rank=(?P<rank>\d{1,5}), world_size=")  # of the worker that prints it
_RAY_DEAD = re.compile(
    r"Worker PID: (?P<pid>\d+) Worker exit type: (?!INTENDED)"
    r"(?:.*[Ee]xit code:? (?P<code>\d+)|.*(?P<memory>low on memory))?"
)


class Launchers:
    """Collects the ends of processes that launchers, clusters and the kernel report."""

    def __init__(self, job: LoggedJob) -> None:
        self.job = job
        self.cancelled = False  # from outside, before anything failed: later reports are effects
        self._stopping = False  # Slurm ends the other tasks of the step
        self._local: list[tuple[int, RankEnd]] = []  # by local rank
        self._tasks: list[tuple[int, RankEnd]] = []  # Slurm's: ranks, unless one of them is a launcher
        self._stopped: dict[Speaker | None, set[str]] = {}  # pids that a launcher of torch stopped after a failure
        self._put_down: set[int] = set()  # pids that a launcher had to kill
        self._spawned: dict[int, LogLine] = {}  # processes whose tracebacks follow
        self._first_end: dict[str, LogLine] = {}  # where a launcher, by its pid, reported its first failure
        self._named: int | None = None  # the process that mpirun saw end first
        self._command = ""  # beginning of a command in several lines
        self.several = False  # arguments or a configuration show that the job has several nodes

    def hear(self, said: SpokenLine) -> None:
        """Takes a line that may report an end."""
        self._hear_torch(said)
        self._hear_mpi(said)
        self._hear_end(said)
        self.cancelled = self.cancelled or _CANCELLED.search(said.text) is not None
        self._stopping = self._stopping or _STOPPING.search(said.text) is not None
        if found := _KERNEL_KILL.search(said.text):
            self.job.kills[int(found["pid"])] = said.text.strip()
        if found := _XID.search(said.text):
            self.job.xids.append((int(found["pid"]), found["number"], said.line))
        self._hear_ray(said)
        if found := _REMARKS.search(said.text):
            self.job.remark(next(filter(None, found.groups())), said.line)

    def hear_form(self, one: Heard, said: SpokenLine) -> None:
        """Takes a line of a summary, a command or a configuration, which means nothing by itself."""
        text, job = said.text, self.job
        if (field := _FIELD.match(text)) is not None:
            one.block[field["name"]] = field["value"].strip()
            if field["name"] == "exitcode":
                one.block_at = said.line
        elif text.startswith(("[", "---", "===", "Root Cause")):
            self.end_block(one, said.speaker)
            one.block_root = text.startswith("Root Cause") or (one.block_root and not text.startswith("==="))
        self.several = self.several or (any(word in text for word in _OF_NODES) and _SEVERAL.search(text) is not None)
        self._command = f"{self._command}\n{text}" if self._command else text
        if not text.endswith("\\") or len(self._command) > _MOST_COMMAND:
            job.launch, self._command = best_launch(job.launch, self._command), ""
        own = _RAY_OWN_RANK.search(text) if "env://" in text else None
        if own and (pid := re.search(r"pid=(\d+)", str(said.speaker))):
            job.ranks[pid[1]] = int(own["rank"])
        if any(word in text for word in _OF_WORLD) and (found := _WORLD.search(text)):
            job.world = max(job.world, min(int(found["world"]), MAX_RANKS))

    def end_block(self, one: Heard, speaker: Speaker | None) -> None:
        """Notes one failure of torchrun's summary, which is complete."""
        block, one.block = one.block, {}
        rank = re.match(r"(\d+)", block.get("rank", ""))
        code = re.match(r"(-?\d+)(?: +\(pid: (\d+)\))?", block.get("exitcode", ""))
        if rank and code and int(rank[1]) < MAX_RANKS:
            at, host, time = one.block_at or one.first, block.get("host", ""), block.get("time", "")
            ended = RankEnd(int(code[1]), at, int(code[2] or 0), host, one.block_root, speaker, time=time)
            self.job.ended[int(rank[1])] = ended
            if local := re.search(r"local_rank: (\d+)", block["rank"]):
                self.job.first[speaker] = int(rank[1]) - int(local[1])

    def restart_before(self, said: SpokenLine) -> LogLine | None:
        """Returns the first failure that a launcher reported, if this line reports a second one: it has restarted its
        ranks in between, and what ended them before did not end the job.
        """
        launcher = _LAUNCHER_PID.match(said.text) if _EXIT.search(said.text) else None
        if launcher is None:
            return None
        before, self._first_end[launcher["pid"]] = self._first_end.get(launcher["pid"]), said.line
        if before is None or before.file != said.line.file:
            return None
        self._local = [(rank, ended) for rank, ended in self._local if ended.line != before]
        self._stopped.clear()
        return before

    def restarts(self, said: SpokenLine) -> bool:
        """Returns whether torchrun restarts its ranks, and forgets their ends if so."""
        if "orker group" not in said.text or not _RESTART.search(said.text):
            return False
        self.job.ended.clear()
        self._local.clear()
        return True

    def take(self, opened: OpenTraceback, raised: RankException) -> bool:
        """Notes an exception of a launcher, or of processes that did not meet.

        Returns:
            False if a rank raised it
        """
        job, kind, line = self.job, raised.type.rpartition(".")[2], opened.line
        files = [fr.normal(frame.file) for frame in raised.frames]
        of_launcher = any(file.endswith(_LAUNCHERS) for file in files)
        if kind.startswith("Rendezvous") or _NOT_MET.search(raised.message):
            self._note_rendezvous(raised, line)
            if of_launcher or any("/elastic/" in file for file in files):
                return True
        if kind != "ChildFailedError" and of_launcher:
            job.remark(f"the launcher itself ended: {words_of(raised)}", line)
        elif kind == "CalledProcessError" and _OF_A_PROGRAM.match(raised.message):
            if how := _STATUS_OF_A_PROGRAM.search(raised.message):
                code = _code_of(how["code"], how["name"])
                job.lose("a process of the launcher's", code, opened.said)
            job.remark(f"what was launched has failed: {raised.message}", line)
        elif kind in _NOT_OF_A_RANK:
            if kind == "SignalException" and (sent := _SIGNALLED.match(raised.message)):
                name = sent["signal"] if not sent["signal"].isdigit() else signal_name(-int(sent["signal"]))
                job.remark(", ".join(filter(None, (f"torchrun got {name}", _SENT_WHEN.get(name)))), line)
        elif files and files[0].endswith("/torch/multiprocessing/spawn.py"):  # the ranks' parent
            if ended := _SPAWNED.search(raised.message):
                code = _code_of(ended["code"], ended["signal"])
                if self.several:
                    job.lose(local_label("", ended["rank"]), code, opened.said)
                else:
                    job.end(int(ended["rank"]), code, line)
        else:
            return False
        return True

    def end(self) -> None:
        """Gives ranks to the ends that came with other numbers."""
        job = self.job
        for rank, line in self._spawned.items():
            if rank not in job.heard or not job.heard[rank].raised:  # its end is not in the log
                job.end(rank, 1, line)
        pids = {one.pid for one in job.ended.values()} - {0}
        local = [ended for _, ended in self._local]
        for by, stopped in self._stopped.items():  # torchrun lists all processes of its node: failed ones and others
            failed = {str(one.pid) for one in (*job.ended.values(), *local) if one.by == by}
            job.world = max(job.world, len(failed | stopped) - ("0" in failed))
        if None not in job.first and not self._has_several_nodes():
            job.first[None], job.assumes_one_node = 0, True
        for number, ended in self._local:
            if ended.pid not in pids:
                self._place(number, ended)
        for rank, ended in self._tasks:
            if self._local or job.first:
                job.remark(ended.line.text, ended.line)
            else:
                job.ended.setdefault(rank, ended)
        for ended in job.ended.values():
            ended.stopped |= ended.pid in self._put_down

    def _place(self, local: int, ended: RankEnd) -> None:
        job, node = self.job, str(ended.by or "")
        first, own = job.first.get(ended.by), job.heard.get(local)
        if first is not None or (own is not None and own.raised):  # a prefix gives the same number
            job.ended.setdefault((first or 0) + local, ended)
        else:
            name = f"{node}{LOCAL}{local}"
            job.lost.setdefault(name if name in job.heard else local_label(node, local), ended)

    def _has_several_nodes(self) -> bool:
        """Returns whether the launcher's processes are not all of the job."""
        stopped = self._stopped.get(None, set()) | {str(one.pid) for _, one in self._local if one.by is None}
        ranks = [rank for rank in self.job.heard if isinstance(rank, int)]
        asked = self.several or re.search(r"--?nnodes[= ](?!1\b)|--?node[-_]rank", " ".join(self.job.launch))
        world = max([self.job.world, *(rank + 1 for rank in ranks)])
        return bool(asked or self.job.files or self._tasks) or world > len(stopped)

    def _hear_torch(self, said: SpokenLine) -> None:
        """Hears torchrun, torch.multiprocessing and DeepSpeed."""
        text, line, job = said.text, said.line, self.job
        if found := _EXIT.search(text):
            ended = RankEnd(int(found["code"]), line, int(found["pid"]), root=True, by=said.speaker)
            self._local.append((int(found["rank"]), ended))
        if found := _DEEPSPEED.search(text):
            job.failed.add(said.speaker)
            job.remarks.pop("Killing subprocess", None)  # this gives the reason
            job.lose("" if said.speaker else "a process of DeepSpeed's", int(found["code"]), said)
        if (found := OF_A_CHILD.match(text)) and int(found["rank"]) < MAX_RANKS and not self.several:
            self._spawned.setdefault(int(found["rank"]), line)
        if found := _KILLED_BY_LAUNCHER.search(text):
            self._put_down.add(int(found["pid"]))
        if found := _CLOSING.search(text):
            self._stopped.setdefault(said.speaker, set()).add(found["pid"])

    def _hear_mpi(self, said: SpokenLine) -> None:
        """Hears Lightning, Composer, mpirun and MPI."""
        if found := _IN_WORDS.search(said.line.text):
            code = int(found["code"] or 1) * (-1 if found["signal"] else 1)
            self.job.end(int(found["rank"] or found["aborts"] or found["aborted"]), code, said.line)
        if found := _NAMED.match(said.text):
            self._named = int(found["rank"])

    def _hear_end(self, said: SpokenLine) -> None:
        """Hears Slurm, shells, kubectl, and other programs that report the end of a process."""
        text, job = said.text, self.job
        if found := _TASK_ENDED.search(text):
            self._note_tasks(found, said.line)
        elif found := _DIED.search(text):
            self._note_died(found, said.line)
        elif found := _KILLED.match(text):
            job.lose(f"process {found['pid']}" if found["pid"] else "", -SIGNALS[found["how"]], said)
        elif _OOM_KILLED.search(text):
            names = (name for name in (*job.heard, *job.labels) if isinstance(name, str) and name.startswith("pod/"))
            pod = next((name for name in names if text.split()[:1] == [name.split("/")[1]]), "")
            job.lose(pod, -signal.SIGKILL, said)
        elif found := _RAY_MEMORY.search(text):
            job.lose(f"process {found['pid']}", -signal.SIGKILL, said)
        elif found := _CODE.match(text):
            if self._named is None:
                job.lose("", int(found["code"]), said)
            elif self._named < MAX_RANKS:
                job.end(self._named, int(found["code"]), said.line)

    def _note_tasks(self, found: re.Match[str], line: LogLine) -> None:
        code = int(found["code"]) if found["code"] else -SIGNALS.get((found["how"] or "").strip(), 0)
        for part in found["tasks"].split(","):
            first, _, last = part.partition("-")
            for task in range(int(first or 0), min(int(last or first or 0), MAX_RANKS) + 1) if code else ():
                stopped = was_terminated(code) or self.cancelled or (self._stopping and found["how"] == "Killed")
                ended = RankEnd(code, line, host=found["host"], root=not (stopped or self._stopping), stopped=stopped)
                self._tasks.append((task, ended))

    def _note_died(self, found: re.Match[str], line: LogLine) -> None:
        number, label = int(found["number"]), found["label"].lower()
        code = int(found["code"] or -int(found["signal"] or getattr(signal, f"SIG{found['name']}", 0)))
        if code and label in ("rank", "task") and number < MAX_RANKS:
            self.job.end(number, of_shell(code), line)
        elif code:
            name = f"{'process' if label == 'pid' else label} {number}"
            self.job.lost.setdefault(name, RankEnd(of_shell(code), line, root=True))

    def _hear_ray(self, said: SpokenLine) -> None:
        job = self.job
        if found := _RAY_RANK.search(said.text):
            rank = int(found["rank"])
            other = job.ranks.get(found["pid"], rank) != rank  # on another host
            job.ranks[found["pid"]] = -1 if other else rank
            job.ranks[f"{found['pid']}, ip={found['ip']}"] = rank
        if found := _RAY_DEAD.search(said.text):
            code = int(found["code"] or (-signal.SIGKILL if found["memory"] else UNKNOWN_SIGNAL))
            if found["pid"] in job.ranks:
                job.end(job.ranks[found["pid"]], code, said.line, int(found["pid"]))
            else:
                ended = RankEnd(code, said.line, int(found["pid"]), root=True)
                job.lost.setdefault(f"process {found['pid']}", ended)

    def _note_rendezvous(self, raised: RankException, line: LogLine) -> None:
        """Notes that processes did not meet; the store where they were to do so may not answer."""
        found = _OF_RENDEZVOUS.search(raised.message) or _OF_RENDEZVOUS.search(raised.text)
        known = self.job.rendezvous
        if known is None or (found and not known.store):
            store = f"the store at {found['host']}:{found['port']} did not answer" if found else ""
            if listens := _LISTENS.search(raised.message):
                store = f"torchrun's store could not listen on port {listens['port']}"
            lines = [text for text in raised.text.splitlines() if found and found[0] in text]
            error = one_line(lines[-1] if lines else f"{raised.type.rpartition('.')[2]}: {raised.message}").rstrip(".")
            self.job.rendezvous, self.job.rendezvous_at = Rendezvous(0, 0, store=store, error=error), line


def words_of(raised: RankException) -> str:
    """Returns the line that Python prints of it."""
    return f"{raised.type}: {raised.message}" if raised.message else raised.type


def _code_of(code: str | None, name: str | None) -> int:
    """Returns a returncode from one of these, and 0 if the signal of that name is not known."""
    return int(code or -getattr(signal, name or "", 0))
