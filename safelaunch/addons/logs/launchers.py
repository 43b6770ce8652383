"""Parses what launchers, shells, clusters and the kernel report about the end of processes."""

from __future__ import annotations

import re
import signal

from safelaunch.addons.logs.launch_line import best_launch
from safelaunch.addons.logs.lines import MAX_RANKS, LogLine
from safelaunch.addons.logs.records import LoggedJob, RankEnd, SpeakerOutput, local_label, of_shell, was_terminated
from safelaunch.addons.logs.speakers import LOCAL, LogEntry, Speaker
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
_WORLD_HINTS = ("orld", "ORLD", "nproc", "num_processes", "NTASKS", " of ", "Starting with")
_WORLD = re.compile(
    r"(?:world[ _]size\W{1,4}|\branks? \d+ (?:of|out of) |\bnproc[-_]per[-_]node[= ]|\bnum_processes[= ]|SLURM_NTASKS="
    r"|registered. Starting with )(?P<world>\d{1,6})\b",
    re.IGNORECASE,
)

# --- torchrun, torch.multiprocessing, DeepSpeed -----------------------------------------------------------------------
# Printed in arguments and configurations of multi-node jobs.
_NODES_HINTS = ("nodes", "machines", "node_rank", "machine_rank")
_MULTI_NODE = re.compile(
    r"\b(?:(?:min|max)_nodes|nnodes|num_(?:nodes|machines))['\"]?\s*[:=]\s*(?!1\b)\d"
    r"|\b(?:node|machine)_rank['\"]?\s*[:=]\s*[1-9]"
)
CHILD_ERROR = re.compile(r"-- Process (?P<rank>\d{1,6}) terminated with the following error")
_FIELD = re.compile(r" {1,3}(?P<name>time|host|rank|exitcode|error_file|traceback) *: (?P<value>.*)")
_EXIT = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+) \(pid: (?P<pid>\d+)\)")
_LAUNCHER_PID = re.compile(r"[EW]\d{4} [\d:.]+ (?P<pid>\d+) ")
_KILLED_BY_LAUNCHER = re.compile(r"Unable to shutdown process (?P<pid>\d+) via")
_CLOSING = re.compile(r"Sending process (?P<pid>\d+) closing signal")
_RESTART = re.compile(r"will restart worker group|Restarting worker group")
_SPAWNED = re.compile(r"process (?P<rank>\d+) terminated with (?:signal (?P<signal>SIG\w+)|exit code (?P<code>\d+))")
# DeepSpeed names the command of its last process here, not of the failed one.
_DEEPSPEED = re.compile(r"launch\.py:\d+:sigkill_handler\].*exits with return code = (?P<code>-?\d+)")

# --- exceptions of launchers ------------------------------------------------------------------------------------------
_LAUNCHER_EXCEPTIONS = ("ChildFailedError", "SignalException", "KeyboardInterrupt")
_LAUNCHERS = (
    "/torch/distributed/run.py", "/torch/distributed/launcher/api.py", "/horovod/runner/launch.py",
    "/ray/_private/worker.py",
)  # fmt: skip
_LAUNCHED_PROGRAM = re.compile(r"Command '.{0,200}?(?:python|torchrun|accelerate|deepspeed)", re.IGNORECASE | re.DOTALL)
_PROGRAM_STATUS = re.compile(r"died with <Signals\.(?P<name>SIG\w+)|exit status (?P<code>\d+)")
_SIGNALLED = re.compile(r"Process \d+ got signal: (?:Signals\.)?(?P<signal>\w+)")
_SENT_WHEN = {
    "SIGHUP": "which a terminal sends that closes, and which ends torchrun under nohup, too: tmux or setsid help",
    "SIGINT": "which Ctrl-C sends",
    "SIGTERM": "which a scheduler sends, or kill",
}
# The c10d store of torchrun's agents or of the ranks doesn't answer.
_STORE_ADDRESS = re.compile(
    r"(?:while trying to connect to|failed to connect to|Connection to) \(?\[?(?P<host>[\w.-]+)\]?"
    r"[,:]+ ?(?P<port>\d{2,5})"
)
_RENDEZVOUS_FAILED = re.compile(
    rf"{_STORE_ADDRESS.pattern}|store based barrier on rank|\b\d+/\d+ clients joined"
    r"|failed to listen on any local network"
)
_LISTENS = re.compile(r"failed to listen on any local network address.*port: (?P<port>\d+)")

# --- Lightning, Composer, mpirun, MPI, horovodrun ---------------------------------------------------------------------
_RANK_ENDED = re.compile(
    r"(?:\[rank: |Rank |process rank )(?P<rank>\d{1,5})(?:\] Child process .{0,40}terminated with code "
    r"| crashed with exit code | .{0,80}exited on (?P<signal>signal) )(?P<code>-?\d+)"
    r"|MPI_ABORT was invoked on rank (?P<aborts>\d{1,5}) in communicator MPI_COMM_WORLD"
    r"|has exited due to process rank (?P<aborted>\d{1,5})\b"
)
_PROCESS_NAME = re.compile(r"\s*Process name: (?:\[\[\d+,\d+\],)?(?P<rank>\d{1,6})\]?$")
_CODE = re.compile(r"\s*[Ee]xit [Cc]ode: +(?P<code>\d{1,3})$")  # of an MPI process or a container

# --- Slurm, Ray, Kubernetes, shells, the kernel -----------------------------------------------------------------------
# All wordings of cluster launchers, and of libraries that watch their processes.
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
# Shells about a child, kubectl about a container, Slurm about a step.
_KILLED = re.compile(
    r"(?:\S+: line \d+: +)?(?P<pid>\d+)? *(?P<how>Killed|Segmentation fault|Aborted|Bus error|Illegal instruction"
    r"|Floating point exception)(?: \(core dumped\))?(?:$| {2,})"
)
_OOM_KILLED = re.compile(r"\bOOM[ -]?Killed\b|Detected \d+ oom[-_]kill event", re.IGNORECASE)
_KERNEL_KILL = re.compile(r"(?:Out of memory|Memory cgroup out of memory): Killed process (?P<pid>\d+)")
# Lost or broken GPUs. The application causes most other Xids.
_XID = re.compile(r"NVRM: Xid \(.*\): (?P<number>48|79|94|95|119), pid='?(?P<pid>\d+)")
_RAY_MEMORY = re.compile(r"where the task \(.*\bpid=(?P<pid>\d+).* was (?:running|killed)")
_RAY_RANK = re.compile(r"(?:ip=(?P<ip>[\w.:]+), )?pid=(?P<pid>\d+)\)[^)\n]{0,40}world_rank=(?P<rank>\d{1,5})\b")
_RAY_OWN_RANK = re.compile(r"env:// \[rank=(?P<rank>\d{1,5}), world_size=")  # rank of the worker that prints it
_RAY_DEAD = re.compile(
    r"Worker PID: (?P<pid>\d+) Worker exit type: (?!INTENDED)"
    r"(?:.*[Ee]xit code:? (?P<code>\d+)|.*(?P<memory>low on memory))?"
)


class Launchers:
    def __init__(self, job: LoggedJob) -> None:
        self.job = job
        self.cancelled = False  # from outside, before any failure; later reports are effects
        self._stopping = False
        self._local: list[tuple[int, RankEnd]] = []
        self._tasks: list[tuple[int, RankEnd]] = []  # Slurm tasks: these are ranks unless one is a launcher
        self._stopped: dict[Speaker | None, set[str]] = {}  # pids that torchrun stopped after a failure
        self._force_killed: set[int] = set()
        self._spawned: dict[int, LogLine] = {}  # child processes with tracebacks in the following lines
        self._first_end: dict[str, LogLine] = {}  # first failure that each launcher reported, by launcher pid
        self._first_ended: int | None = None  # first process to end, according to mpirun
        self._command = ""
        self.is_multi_node = False

    def read_line(self, entry: LogEntry) -> None:
        self._read_torch(entry)
        self._read_mpi(entry)
        self._read_end(entry)
        self.cancelled = self.cancelled or _CANCELLED.search(entry.text) is not None
        self._stopping = self._stopping or _STOPPING.search(entry.text) is not None
        if match := _KERNEL_KILL.search(entry.text):
            self.job.kills[int(match["pid"])] = entry.text.strip()
        if match := _XID.search(entry.text):
            self.job.xids.append((int(match["pid"]), match["number"], entry.line))
        self._read_ray(entry)
        if match := _REMARKS.search(entry.text):
            self.job.remark(next(filter(None, match.groups())), entry.line)

    def read_fragment(self, output: SpeakerOutput, entry: LogEntry) -> None:
        text, job = entry.text, self.job
        if (field := _FIELD.match(text)) is not None:
            output.block[field["name"]] = field["value"].strip()
            if field["name"] == "exitcode":
                output.block_at = entry.line
        elif text.startswith(("[", "---", "===", "Root Cause")):
            self.end_block(output, entry.speaker)
            output.block_root = text.startswith("Root Cause") or (output.block_root and not text.startswith("==="))
        self.is_multi_node = self.is_multi_node or (
            any(word in text for word in _NODES_HINTS) and _MULTI_NODE.search(text) is not None
        )
        self._command = f"{self._command}\n{text}" if self._command else text
        if not text.endswith("\\") or len(self._command) > _MOST_COMMAND:
            job.launch, self._command = best_launch(job.launch, self._command), ""
        rank_match = _RAY_OWN_RANK.search(text) if "env://" in text else None
        if rank_match and (pid := re.search(r"pid=(\d+)", str(entry.speaker))):
            job.ray_ranks[pid[1]] = int(rank_match["rank"])
        if any(word in text for word in _WORLD_HINTS) and (match := _WORLD.search(text)):
            job.world = max(job.world, min(int(match["world"]), MAX_RANKS))

    def end_block(self, output: SpeakerOutput, speaker: Speaker | None) -> None:
        """Records a failure from torchrun's summary, which this line completes."""
        block, output.block = output.block, {}
        rank = re.match(r"(\d+)", block.get("rank", ""))
        code = re.match(r"(-?\d+)(?: +\(pid: (\d+)\))?", block.get("exitcode", ""))
        if rank and code and int(rank[1]) < MAX_RANKS:
            at, host, time = output.block_at or output.first, block.get("host", ""), block.get("time", "")
            finish = RankEnd(int(code[1]), at, int(code[2] or 0), host, output.block_root, speaker, time=time)
            self.job.ends[int(rank[1])] = finish
            if local := re.search(r"local_rank: (\d+)", block["rank"]):
                self.job.first_ranks[speaker] = int(rank[1]) - int(local[1])

    def earlier_failure(self, entry: LogEntry) -> LogLine | None:
        """Returns the launcher's previous failure if this line reports a new one: the ranks were restarted in between.

        Otherwise returns None.
        """
        launcher = _LAUNCHER_PID.match(entry.text) if _EXIT.search(entry.text) else None
        if launcher is None:
            return None
        before, self._first_end[launcher["pid"]] = self._first_end.get(launcher["pid"]), entry.line
        if before is None or before.file != entry.line.file:
            return None
        self._local = [(rank, finish) for rank, finish in self._local if finish.line != before]
        self._stopped.clear()
        return before

    def note_restart(self, entry: LogEntry) -> bool:
        """If the line reports that torchrun restarts its ranks, forgets how they ended, and returns True."""
        if "orker group" not in entry.text or not _RESTART.search(entry.text):
            return False
        self.job.ends.clear()
        self._local.clear()
        return True

    def note_exception(self, traceback: OpenTraceback, error: RankException) -> bool:
        """Records an exception raised by a launcher or a failed rendezvous; returns False if a rank raised it."""
        job, kind, line = self.job, error.type.rpartition(".")[2], traceback.line
        files = [fr.normal(frame.file) for frame in error.frames]
        of_launcher = any(file.endswith(_LAUNCHERS) for file in files)
        if kind.startswith("Rendezvous") or _RENDEZVOUS_FAILED.search(error.message):
            self._note_rendezvous(error, line)
            if of_launcher or any("/elastic/" in file for file in files):
                return True
        if kind != "ChildFailedError" and of_launcher:
            job.remark(f"the launcher itself ended: {exception_line(error)}", line)
        elif kind == "CalledProcessError" and _LAUNCHED_PROGRAM.match(error.message):
            if how := _PROGRAM_STATUS.search(error.message):
                code = _code_of(how["code"], how["name"])
                job.note_unplaced("a process of the launcher's", code, traceback.entry)
            job.remark(f"what was launched has failed: {error.message}", line)
        elif kind in _LAUNCHER_EXCEPTIONS:
            if kind == "SignalException" and (sent := _SIGNALLED.match(error.message)):
                name = sent["signal"] if not sent["signal"].isdigit() else signal_name(-int(sent["signal"]))
                job.remark(", ".join(filter(None, (f"torchrun got {name}", _SENT_WHEN.get(name)))), line)
        elif files and files[0].endswith("/torch/multiprocessing/spawn.py"):  # in the parent of the ranks
            if match := _SPAWNED.search(error.message):
                code = _code_of(match["code"], match["signal"])
                if self.is_multi_node:
                    job.note_unplaced(local_label("", match["rank"]), code, traceback.entry)
                else:
                    job.note_end(int(match["rank"]), code, line)
        else:
            return False
        return True

    def finish(self) -> None:
        job = self.job
        for rank, line in self._spawned.items():
            if rank not in job.outputs or not job.outputs[rank].errors:  # the log doesn't have its end
                job.note_end(rank, 1, line)
        pids = {finish.pid for finish in job.ends.values()} - {0}
        local = [finish for _, finish in self._local]
        for node, stopped in self._stopped.items():  # torchrun lists all processes of its node, failed or not
            failed = {str(finish.pid) for finish in (*job.ends.values(), *local) if finish.reporter == node}
            job.world = max(job.world, len(failed | stopped) - ("0" in failed))
        if None not in job.first_ranks and not self._is_multi_node():
            job.first_ranks[None], job.assumes_one_node = 0, True
        for number, rank_end in self._local:
            if rank_end.pid not in pids:
                self._note_local_end(number, rank_end)
        for rank, rank_end in self._tasks:
            if self._local or job.first_ranks:
                job.remark(rank_end.line.text, rank_end.line)
            else:
                job.ends.setdefault(rank, rank_end)
        for rank_end in job.ends.values():
            rank_end.stopped |= rank_end.pid in self._force_killed

    def _note_local_end(self, local: int, finish: RankEnd) -> None:
        job, node = self.job, str(finish.reporter or "")
        first, output = job.first_ranks.get(finish.reporter), job.outputs.get(local)
        if first is not None or (output is not None and output.errors):  # a prefix gives the same number
            job.ends.setdefault((first or 0) + local, finish)
        else:
            name = f"{node}{LOCAL}{local}"
            job.unplaced.setdefault(name if name in job.outputs else local_label(node, local), finish)

    def _is_multi_node(self) -> bool:
        stopped = self._stopped.get(None, set()) | {
            str(finish.pid) for _, finish in self._local if finish.reporter is None
        }
        ranks = [rank for rank in self.job.outputs if isinstance(rank, int)]
        asked = self.is_multi_node or re.search(r"--?nnodes[= ](?!1\b)|--?node[-_]rank", " ".join(self.job.launch))
        world = max([self.job.world, *(rank + 1 for rank in ranks)])
        return bool(asked or self.job.files or self._tasks) or world > len(stopped)

    def _read_torch(self, entry: LogEntry) -> None:
        text, line, job = entry.text, entry.line, self.job
        if match := _EXIT.search(text):
            finish = RankEnd(int(match["code"]), line, int(match["pid"]), root=True, reporter=entry.speaker)
            self._local.append((int(match["rank"]), finish))
        if match := _DEEPSPEED.search(text):
            job.failed_speakers.add(entry.speaker)
            job.remarks.pop("Killing subprocess", None)  # this line gives the reason
            job.note_unplaced("" if entry.speaker else "a process of DeepSpeed's", int(match["code"]), entry)
        if (match := CHILD_ERROR.match(text)) and int(match["rank"]) < MAX_RANKS and not self.is_multi_node:
            self._spawned.setdefault(int(match["rank"]), line)
        if match := _KILLED_BY_LAUNCHER.search(text):
            self._force_killed.add(int(match["pid"]))
        if match := _CLOSING.search(text):
            self._stopped.setdefault(entry.speaker, set()).add(match["pid"])

    def _read_mpi(self, entry: LogEntry) -> None:
        if match := _RANK_ENDED.search(entry.line.text):
            code = int(match["code"] or 1) * (-1 if match["signal"] else 1)
            self.job.note_end(int(match["rank"] or match["aborts"] or match["aborted"]), code, entry.line)
        if match := _PROCESS_NAME.match(entry.text):
            self._first_ended = int(match["rank"])

    def _read_end(self, entry: LogEntry) -> None:
        text, job = entry.text, self.job
        if match := _TASK_ENDED.search(text):
            self._note_tasks(match, entry.line)
        elif match := _DIED.search(text):
            self._note_death(match, entry.line)
        elif match := _KILLED.match(text):
            job.note_unplaced(f"process {match['pid']}" if match["pid"] else "", -SIGNALS[match["how"]], entry)
        elif _OOM_KILLED.search(text):
            names = (name for name in (*job.outputs, *job.labels) if isinstance(name, str) and name.startswith("pod/"))
            pod = next((name for name in names if text.split()[:1] == [name.split("/")[1]]), "")
            job.note_unplaced(pod, -signal.SIGKILL, entry)
        elif match := _RAY_MEMORY.search(text):
            job.note_unplaced(f"process {match['pid']}", -signal.SIGKILL, entry)
        elif match := _CODE.match(text):
            if self._first_ended is None:
                job.note_unplaced("", int(match["code"]), entry)
            elif self._first_ended < MAX_RANKS:
                job.note_end(self._first_ended, int(match["code"]), entry.line)

    def _note_tasks(self, match: re.Match[str], line: LogLine) -> None:
        code = int(match["code"]) if match["code"] else -SIGNALS.get((match["how"] or "").strip(), 0)
        for part in match["tasks"].split(","):
            first, _, last = part.partition("-")
            for task in range(int(first or 0), min(int(last or first or 0), MAX_RANKS) + 1) if code else ():
                stopped = was_terminated(code) or self.cancelled or (self._stopping and match["how"] == "Killed")
                finish = RankEnd(code, line, host=match["host"], root=not (stopped or self._stopping), stopped=stopped)
                self._tasks.append((task, finish))

    def _note_death(self, match: re.Match[str], line: LogLine) -> None:
        number, label = int(match["number"]), match["label"].lower()
        code = int(match["code"] or -int(match["signal"] or getattr(signal, f"SIG{match['name']}", 0)))
        if code and label in ("rank", "task") and number < MAX_RANKS:
            self.job.note_end(number, of_shell(code), line)
        elif code:
            name = f"{'process' if label == 'pid' else label} {number}"
            self.job.unplaced.setdefault(name, RankEnd(of_shell(code), line, root=True))

    def _read_ray(self, entry: LogEntry) -> None:
        job = self.job
        if match := _RAY_RANK.search(entry.text):
            rank = int(match["rank"])
            differs = job.ray_ranks.get(match["pid"], rank) != rank  # same pid on another host
            job.ray_ranks[match["pid"]] = -1 if differs else rank
            job.ray_ranks[f"{match['pid']}, ip={match['ip']}"] = rank
        if match := _RAY_DEAD.search(entry.text):
            code = int(match["code"] or (-signal.SIGKILL if match["memory"] else UNKNOWN_SIGNAL))
            if match["pid"] in job.ray_ranks:
                job.note_end(job.ray_ranks[match["pid"]], code, entry.line, int(match["pid"]))
            else:
                finish = RankEnd(code, entry.line, int(match["pid"]), root=True)
                job.unplaced.setdefault(f"process {match['pid']}", finish)

    def _note_rendezvous(self, raised_error: RankException, line: LogLine) -> None:
        """Records a failed rendezvous, and the store's address if the store didn't respond."""
        match = _STORE_ADDRESS.search(raised_error.message) or _STORE_ADDRESS.search(raised_error.text)
        earlier = self.job.rendezvous
        if earlier is None or (match and not earlier.store):
            store = f"the store at {match['host']}:{match['port']} did not answer" if match else ""
            if listens := _LISTENS.search(raised_error.message):
                store = f"torchrun's store could not listen on port {listens['port']}"
            lines = [text for text in raised_error.text.splitlines() if match and match[0] in text]
            error = one_line(
                lines[-1] if lines else f"{raised_error.type.rpartition('.')[2]}: {raised_error.message}"
            ).rstrip(".")
            self.job.rendezvous, self.job.rendezvous_at = Rendezvous(0, 0, store=store, error=error), line


def exception_line(error: RankException) -> str:
    return f"{error.type}: {error.message}" if error.message else error.type


def _code_of(code: str | None, name: str | None) -> int:
    return int(code or -getattr(signal, name or "", 0))
