"""Reads a job's output line by line. Collects tracebacks, and passes all other lines to parsers.

``launchers`` parses reports about the end of processes, ``calls`` those about calls, and ``error_lines`` other lines
that look like errors.
"""

from __future__ import annotations

import re

from safelaunch.addons.logs.calls import Calls
from safelaunch.addons.logs.launchers import CHILD_ERROR, Launchers, exception_line
from safelaunch.addons.logs.lines import LITERALS, MAX_RANKS
from safelaunch.addons.logs.records import LoggedJob, SpeakerOutput
from safelaunch.addons.logs.speakers import LOCAL, LogEntry
from safelaunch.addons.logs.tracebacks import BARE, BOXED, FATAL, HEAD, Crash, OpenTraceback
from safelaunch.model import RankException
from safelaunch.stacks import tracebacks
from safelaunch.stacks.aborts import last_abort, options_refused
from safelaunch.verdict.exceptions import is_consequence

_SUMMARY_TRACEBACK = re.compile(r" {1,3}traceback *: (?=Traceback \(most)")
_FRAME = re.compile(r' +File "[^"]+", line \d+(?:, in \S|$)')
# Output of launchers and torch's logger.
_NOT_SCRIPT = re.compile(
    r"\s|\[?[IWEF]\d{3,4} |===|---|\[|Root Cause|Failures:|srun: |slurmstepd: |Exception (?:ignored|in thread)"
    r"|Killing subprocess |Exception raised from |frame #\d+: |$"
)
_RAY_TASK_ERROR = re.compile(
    r"ray\.exceptions\.RayTaskError\(\w+\): ray::.*?\(pid=(?P<pid>\d+)"
)  # exceptions of a worker


class ReportCollector:
    def __init__(self) -> None:
        self.job = LoggedJob()
        self.launchers = Launchers(self.job)
        self.calls = Calls(self.job)

    def read_line(self, entry: LogEntry) -> None:
        output, text = self.job.process(entry.speaker, entry.line), entry.text
        output.last = entry.line
        if not (entry.line.may_report or output.traceback or output.crashes):
            self._note_progress(output, entry)
            return
        if entry.label and isinstance(entry.speaker, int):
            self.job.labels.setdefault(entry.label, set()).add(entry.speaker)
        traceback = output.traceback
        output.heads += text.startswith(HEAD)
        while output.traceback is not None and not output.traceback.take(text, timed=entry.timed):
            self._close(output)  # might open the traceback that this one wraps
        if output.traceback is None:
            output.traceback = self._begin_traceback(output, entry)
            self.calls.read_nccl(output, entry)
        from_script = self._note_progress(output, entry)
        if text.startswith(FATAL):
            output.crashes = [*output.crashes[-1:], Crash(entry.line, [text])]
        elif output.crashes:
            output.crashes[-1].take(text, from_script=from_script)
        may_report = any(literal in text for literal in LITERALS)
        self.job.events.read_line(entry, may_report=may_report and output.traceback is None and traceback is None)
        if output.traceback is None or output.traceback.state == "after":
            self.calls.read_fragment(text)
            self.launchers.read_fragment(output, entry)
            if may_report:
                self._note_report(output, entry)

    def finish(self) -> None:
        for speaker, output in list(self.job.outputs.items()):
            self._close(output, at_end=True)
            self.launchers.end_block(output, speaker)
        self.job.restore_previous_attempt()
        self.launchers.finish()

    def _note_progress(self, output: SpeakerOutput, entry: LogEntry) -> bool:
        """Returns whether the line shows that its process continued although it seemed to have ended."""
        text = entry.text
        if output.traceback is None or output.traceback.state == "after":
            output.tail.append(text)
        output.before = text
        same_file = output.end is None or output.end.file == entry.line.file
        from_script = output.traceback is None and same_file and not (entry.timed or _NOT_SCRIPT.match(text))
        if from_script:
            output.after.add(text)
        self.calls.read_progress(output, entry, from_script=from_script)
        if from_script and isinstance(entry.speaker, str) and (unnamed := self.job.outputs.get(None)) is not None:
            # A named node still prints, so the job survived the unnamed errors.
            if unnamed.traceback is not None and unnamed.traceback.state in ("message", "after"):
                self._close(unnamed)
            unnamed.after.add_usual()
        self.job.events.note_progress(entry)
        return from_script

    def _begin_traceback(self, output: SpeakerOutput, entry: LogEntry) -> OpenTraceback | None:
        if self.launchers.cancelled:
            return None
        text, traceback = entry.text, None
        if of_summary := _SUMMARY_TRACEBACK.match(text):
            rank = re.match(r"\d+", output.block.get("rank", ""))
            traceback = OpenTraceback(
                entry.line, [text[of_summary.end() :]], False, entry, int(rank[0]) if rank else None, indent="  "
            )
        elif text.lstrip(" |+").startswith(HEAD) or BOXED.match(text):
            thread = output.before.startswith(("Exception in thread", "Exception ignored"))
            of_child = CHILD_ERROR.match(output.before)
            traceback = OpenTraceback(entry.line, [text], thread, entry, int(of_child["rank"]) if of_child else None)
            traceback.is_local = of_child is not None and self.launchers.is_multi_node
        elif of_ray := _RAY_TASK_ERROR.match(text):
            traceback = OpenTraceback(entry.line, [HEAD], False, entry, pid=of_ray["pid"])
        elif _FRAME.match(text):
            traceback = OpenTraceback(entry.line, [HEAD, text], False, entry, cut=True)
        elif not output.errors and BARE.match(text):
            traceback = OpenTraceback(entry.line, [HEAD, text], False, entry, state="message", cut=True)
        if traceback is not None:
            traceback.socket, traceback.ignored = output.socket, output.before.startswith("Exception ignored")
        return traceback

    def _close(self, output: SpeakerOutput, *, at_end: bool = False) -> None:
        traceback, output.traceback = output.traceback, None
        error = traceback.exception(traceback.line.number * 1e-3, cut_off=at_end) if traceback is not None else None
        if traceback is None or error is None:
            return
        place = f" at {error.frames[0].file}:{error.frames[0].line}" if error.frames else ""
        kind = "thread" if traceback.thread else "effect" if is_consequence(error) else "traceback"
        self.job.events.add(kind, f"{exception_line(error)}{place}", traceback.entry, harmless=traceback.ignored)
        if traceback.thread:
            again = output.errors and (output.errors[-1][1].type, output.errors[-1][1].message) == (
                error.type,
                error.message,
            )
            output.errors = output.errors[:-1] if again else output.errors
        elif of_ray := _RAY_TASK_ERROR.match(exception_line(error)):
            output.traceback = OpenTraceback(traceback.line, [HEAD], False, traceback.entry, pid=of_ray["pid"])
        elif not self.launchers.note_exception(traceback, error):
            self.calls.note_absent(error.message)
            if error.type.startswith("ray.exceptions."):
                self.job.remark(f"Ray: {error.type}: {error.message}", traceback.line)
            else:
                self._attribute(output, traceback, error)

    def _attribute(self, output: SpeakerOutput, traceback: OpenTraceback, error: RankException) -> None:
        """Assigns an exception to the rank or process that its text names, or else to the one that printed it."""
        job = self.job
        if traceback.pid:
            speaker = next(
                (name for name in job.outputs if f"pid={traceback.pid}" in str(name)), f"pid={traceback.pid}"
            )
            output = job.process(job.ray_ranks.get(traceback.pid, speaker), traceback.line)
        if traceback.rank is not None and traceback.rank < MAX_RANKS:
            output = job.process(f"{LOCAL}{traceback.rank}" if traceback.is_local else traceback.rank, traceback.line)
        for rank, inner in tracebacks.gathered(error.message).items():
            if rank < MAX_RANKS and rank != traceback.entry.speaker:  # the speaker reports another rank's exception
                rank_output = job.process(rank, traceback.line)
                kind, _, message = inner.message.partition(": ")
                gathered = RankException(kind, message, error.time_unix_s, inner.frames)
                rank_output.errors = rank_output.errors or [(traceback, gathered)]
        if not output.timed_out:
            output.note(traceback, error)

    def _note_report(self, output: SpeakerOutput, entry: LogEntry) -> None:
        text = entry.text
        if last_abort(text) is not None or "watchdog got stuck" in text or options_refused(text):
            output.abort_line = entry.line
        if (before := self.launchers.earlier_failure(entry)) is not None:
            for restarted in [*self.job.outputs.values()]:
                self._close(restarted)
                restarted.restart_after(before.number)
        self.calls.read_line(output, entry)
        self.launchers.read_line(entry)
        if self.launchers.note_restart(entry):
            self.calls.restart()
            for restarted in self.job.outputs.values():
                restarted.restart()
