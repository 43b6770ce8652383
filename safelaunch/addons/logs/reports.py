"""Reads what a job has printed, line by line: opens and closes tracebacks, and passes the other lines on.

``log_launchers`` takes reports of ends, ``log_calls`` reports of calls, ``log_events`` whatever looks like an error.
"""

from __future__ import annotations

import re

from safelaunch.addons.logs.calls import Calls
from safelaunch.addons.logs.heard import Heard, LoggedJob
from safelaunch.addons.logs.launchers import OF_A_CHILD, Launchers, words_of
from safelaunch.addons.logs.lines import LITERALS, LOCAL, MAX_RANKS, SpokenLine
from safelaunch.addons.logs.tracebacks import BARE, BOXED, FATAL, HEAD, Crash, OpenTraceback
from safelaunch.model import RankException
from safelaunch.stacks import tracebacks
from safelaunch.stacks.aborts import last_abort, options_refused
from safelaunch.verdict.exceptions import is_consequence

_OF_A_SUMMARY = re.compile(r" {1,3}traceback *: (?=Traceback \(most)")
_FRAME = re.compile(r' +File "[^"]+", line \d+(?:, in \S|$)')
# Output of launchers and of torch's log, not of the script.
_NOT_OWN = re.compile(
    r"\s|\[?[IWEF]\d{3,4} |===|---|\[|Root Cause|Failures:|srun: |slurmstepd: |Exception (?:ignored|in thread)"
    r"|Killing subprocess |Exception raised from |frame #\d+: |$"
)
_OF_RAY = re.compile(r"ray\.exceptions\.RayTaskError\(\w+\): ray::.*?\(pid=(?P<pid>\d+)")  # what a worker has raised


class Printed:
    """Collects the reports in a job's output."""

    def __init__(self) -> None:
        self.job = LoggedJob()
        self.launchers = Launchers(self.job)
        self.calls = Calls(self.job)

    def hear(self, said: SpokenLine) -> None:
        """Takes the next line."""
        one, text = self.job.process(said.speaker, said.line), said.text
        one.last = said.line
        if not (said.line.may_tell or one.opened or one.crashes):
            self._note_progress(one, said)
            return
        if said.label and isinstance(said.speaker, int):
            self.job.labels.setdefault(said.label, set()).add(said.speaker)
        opened = one.opened
        one.heads += text.startswith(HEAD)
        while one.opened is not None and not one.opened.take(text, timed=said.timed):
            self._close(one)  # may open the traceback that this one wraps
        if one.opened is None:
            one.opened = self._opened(one, said)
            self.calls.hear_nccl(one, said)
        own = self._note_progress(one, said)
        if text.startswith(FATAL):
            one.crashes = [*one.crashes[-1:], Crash(said.line, [text])]
        elif one.crashes:
            one.crashes[-1].take(text, own=own)
        telling = any(literal in text for literal in LITERALS)
        self.job.events.hear(said, telling=telling and one.opened is None and opened is None)
        if one.opened is None or one.opened.state == "after":
            self.calls.hear_form(text)
            self.launchers.hear_form(one, said)
            if telling:
                self._note(one, said)

    def end(self) -> None:
        """Closes what is open after the last line."""
        for speaker, one in list(self.job.heard.items()):
            self._close(one, at_end=True)
            self.launchers.end_block(one, speaker)
        self.job.remember_attempts()
        self.launchers.end()

    def _note_progress(self, one: Heard, said: SpokenLine) -> bool:
        """Returns whether the line shows that its process works on after the place where it seemed to have ended."""
        text = said.text
        if one.opened is None or one.opened.state == "after":
            one.tail.append(text)
        one.before = text
        same_file = one.end is None or one.end.file == said.line.file
        own = one.opened is None and same_file and not (said.timed or _NOT_OWN.match(text))
        if own:
            one.after.goes_on(text)
        self.calls.hear_progress(one, said, own=own)
        if own and isinstance(said.speaker, str) and (unsigned := self.job.heard.get(None)) is not None:
            # Nodes print lines of their own, so the job has survived the errors without a name.
            if unsigned.opened is not None and unsigned.opened.state in ("message", "after"):
                self._close(unsigned)
            unsigned.after.goes_on_as_usual()
        self.job.events.work_on(said)
        return own

    def _opened(self, one: Heard, said: SpokenLine) -> OpenTraceback | None:
        """Returns the traceback that this line begins, if any."""
        if self.launchers.cancelled:
            return None
        text, found = said.text, None
        if of_summary := _OF_A_SUMMARY.match(text):
            rank = re.match(r"\d+", one.block.get("rank", ""))
            found = OpenTraceback(
                said.line, [text[of_summary.end() :]], False, said, int(rank[0]) if rank else None, indent="  "
            )
        elif text.lstrip(" |+").startswith(HEAD) or BOXED.match(text):
            thread = one.before.startswith(("Exception in thread", "Exception ignored"))
            of_child = OF_A_CHILD.match(one.before)
            found = OpenTraceback(said.line, [text], thread, said, int(of_child["rank"]) if of_child else None)
            found.is_local = of_child is not None and self.launchers.several
        elif of_ray := _OF_RAY.match(text):
            found = OpenTraceback(said.line, [HEAD], False, said, pid=of_ray["pid"])
        elif _FRAME.match(text):
            found = OpenTraceback(said.line, [HEAD, text], False, said, cut=True)
        elif not one.raised and BARE.match(text):
            found = OpenTraceback(said.line, [HEAD, text], False, said, state="message", cut=True)
        if found is not None:
            found.socket, found.ignored = one.socket, one.before.startswith("Exception ignored")
        return found

    def _close(self, one: Heard, *, at_end: bool = False) -> None:
        """Ends the traceback that is open, and passes its exception on."""
        opened, one.opened = one.opened, None
        raised = opened.exception(opened.line.number * 1e-3, cut_off=at_end) if opened is not None else None
        if opened is None or raised is None:
            return
        place = f" at {raised.frames[0].file}:{raised.frames[0].line}" if raised.frames else ""
        kind = "thread" if opened.thread else "effect" if is_consequence(raised) else "traceback"
        self.job.events.add(kind, f"{words_of(raised)}{place}", opened.said, harmless=opened.ignored)
        if opened.thread:
            again = one.raised and (one.raised[-1][1].type, one.raised[-1][1].message) == (raised.type, raised.message)
            one.raised = one.raised[:-1] if again else one.raised
        elif of_ray := _OF_RAY.match(words_of(raised)):
            one.opened = OpenTraceback(opened.line, [HEAD], False, opened.said, pid=of_ray["pid"])
        elif not self.launchers.take(opened, raised):
            self.calls.take(raised.message)
            if raised.type.startswith("ray.exceptions."):
                self.job.remark(f"Ray: {raised.type}: {raised.message}", opened.line)
            else:
                self._attribute(one, opened, raised)

    def _attribute(self, one: Heard, opened: OpenTraceback, raised: RankException) -> None:
        """Notes the exception of a rank: of the speaker, unless the text names another one."""
        job = self.job
        if opened.pid:
            whose = next((name for name in job.heard if f"pid={opened.pid}" in str(name)), f"pid={opened.pid}")
            one = job.process(job.ranks.get(opened.pid, whose), opened.line)
        if opened.rank is not None and opened.rank < MAX_RANKS:
            one = job.process(f"{LOCAL}{opened.rank}" if opened.is_local else opened.rank, opened.line)
        for rank, inner in tracebacks.gathered(raised.message).items():
            if rank < MAX_RANKS and rank != opened.said.speaker:  # the speaker reports another rank's exception
                other = job.process(rank, opened.line)
                kind, _, words = inner.message.partition(": ")
                gathered = RankException(kind, words, raised.time_unix_s, inner.frames)
                other.raised = other.raised or [(opened, gathered)]
        if not one.timed_out:
            one.note(opened, raised)

    def _note(self, one: Heard, said: SpokenLine) -> None:
        """Passes on a line that may report an error."""
        text = said.text
        if last_abort(text) is not None or "watchdog got stuck" in text or options_refused(text):
            one.telling = said.line
        if (before := self.launchers.restart_before(said)) is not None:
            for other in [*self.job.heard.values()]:
                self._close(other)
                other.restart_after(before.number)
        self.calls.hear(one, said)
        self.launchers.hear(said)
        if self.launchers.restarts(said):
            self.calls.restart()
            for other in self.job.heard.values():
                other.restart()
