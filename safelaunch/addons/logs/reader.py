"""Reads a job's log files as evidence, no matter what launched the job."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from safelaunch.addons.logs.collector import ReportCollector
from safelaunch.addons.logs.evidence import log_evidence
from safelaunch.addons.logs.lines import NOT_GZIP, LogLine, common_quote, looks_like_output, read_lines, without_quote
from safelaunch.addons.logs.speakers import (
    PrefixParser,
    Speaker,
    has_rank_field,
    host_pattern,
    join_wrapped,
    speakers_by_file,
)
from safelaunch.bundle.reading.evidence import EvidenceSource
from safelaunch.bundle.reading.files import Unreadable, cannot_be_read


def read_logs(paths: Sequence[Path], root: Path | None = None) -> EvidenceSource:
    """Returns the evidence in log files; it lists no ranks if the files don't report how any ended. Raises Unreadable.

    Args:
        root: Folder that file names in the evidence are relative to; None shows only the last part of each path.
    """
    collector, count, is_output = ReportCollector(), 0, False
    names = [str(path.relative_to(root)) if root is not None else path.name for path in paths]
    speakers = speakers_by_file(names)
    if len(names) > 1:  # each might be the output of one node and its launcher
        collector.job.files = {name for name in names if name not in speakers}
        speakers |= {name: name for name in collector.job.files}
    for path, name in zip(paths, names, strict=True):
        try:
            lines, file_is_output = _read_file(path, name, collector, speakers.get(name))
        except NOT_GZIP as error:
            raise Unreadable("it is damaged") from error
        except OSError as error:
            raise cannot_be_read(error) from error
        count, is_output = count + lines, is_output or file_is_output
    collector.finish()
    result = log_evidence(collector, names, count)
    return replace(result, is_output=is_output or bool(result.evidence.ranks or result.remarks))


def _read_file(path: Path, name: str, collector: ReportCollector, speaker: Speaker | None) -> tuple[int, bool]:
    """Reads a file. Returns its number of lines, and whether it is empty or looks like a job's output."""
    lines = read_lines(path, name)
    first = list(islice(lines, 200))
    quote = common_quote(line.text for line in first if line is not None)
    if quote:
        first, lines = [_without(line, quote) for line in first], (_without(line, quote) for line in lines)
    ahead = deque(first)
    texts = [line.text for line in ahead if line is not None]
    parser = PrefixParser(speaker, host_pattern(texts), has_rank_field(texts))
    last, is_output = 0, not any(map(str.strip, texts))
    while ahead:
        line = ahead.popleft()
        ahead.extend(islice(lines, 1))
        if line is not None:
            last = line.number
            if (whole := join_wrapped(line, ahead[0] if ahead else None)) is not None:
                ahead.popleft()
                line = whole
            entry = parser.parse(line, ahead)
            is_output = is_output or entry.speaker not in (None, name) or looks_like_output(line.text)
            collector.read_line(entry)
    return last, is_output


def _without(line: LogLine | None, quote: str) -> LogLine | None:
    return replace(line, text=without_quote(line.text, quote)) if line is not None else None
