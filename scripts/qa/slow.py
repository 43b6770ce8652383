"""Runs jobs with a planted slow rank, and healthy jobs of an uneven pace, under safelaunch; prints a table.

python -m scripts.qa slow                              # all: two hours on 2 cores
python -m scripts.qa slow --kind planted --jobs 2      # only jobs with a slow rank
python -m scripts.qa slow --kind healthy --seconds 120 # healthy jobs of two minutes instead of ten
python -m scripts.qa slow --only vision,cpu-hog        # by name; a part of a name will do
python -m scripts.qa slow --measure                    # what each plant costs, under plain torchrun
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.qa import slow

MEASURE = slow.How(healthy_s=12.0, onset_s=14.0, after_s=14.0, plain=True)


def main() -> int:
    words, parser = _arguments()
    cases = _chosen(words, parser)
    if words.list:
        print("\n".join(case.name for case in cases))
        return 0
    how = MEASURE if words.measure else slow.How(healthy_s=words.seconds, onset_s=words.onset, after_s=words.after)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # cgroups, networks and swap go, too
    print(f"{'job':<30}{'seconds':>8}{'slower':>8}  result", flush=True)
    one = partial(_run, how=how, keep=words.keep, starting=threading.Lock())
    with ThreadPoolExecutor(words.jobs) as pool:
        try:
            answers = list(pool.map(one, [case for case in cases if not case.alone]))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    answers += [one(case) for case in cases if case.alone]
    if words.record is not None:
        words.record.write_text(json.dumps([answer.as_json() for answer in answers], indent=1) + "\n")
    if words.measure:
        return 1 if any(answer.broken for answer in answers) else 0
    return _sum_up(answers)


def _arguments() -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAMES", help="comma-separated; a part of a name will do")
    parser.add_argument("--kind", choices=("all", "planted", "healthy"), default="all")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="run the Kth of N parts")
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="concurrent jobs, which mostly wait (4)")
    parser.add_argument("--seconds", type=float, default=slow.HEALTHY_S, help="length of a healthy job (600)")
    parser.add_argument("--onset", type=float, default=slow.MIDDLE_S, metavar="SECONDS", help="time of onsets (50)")
    parser.add_argument("--after", type=float, default=slow.AFTER_S, metavar="SECONDS", help="time after it (130)")
    parser.add_argument("--measure", action="store_true", help="measure the plants under plain torchrun instead")
    parser.add_argument("--record", type=Path, metavar="FILE", help="save the results")
    parser.add_argument("--keep", action="store_true", help="keep every job's directory, not only those with a fault")
    parser.add_argument("--list", action="store_true", help="print the names and exit")
    return parser.parse_args(), parser


def _chosen(words: argparse.Namespace, parser: argparse.ArgumentParser) -> list[slow.Case]:
    cases = [case for case in slow.CASES.values() if words.kind == "all" or case.planted == (words.kind == "planted")]
    parts = [part.strip() for part in words.only.split(",") if part.strip()]
    if unknown := [part for part in parts if not any(part in case.name for case in cases)]:
        parser.error(f"no such job: {', '.join(unknown)} (--list has the names)")
    exact = [part for part in parts if part in slow.CASES]
    chosen = [
        case
        for case in cases
        if not parts or case.name in exact or any(part in case.name for part in parts if part not in exact)
    ]
    number, of = map(int, words.part.split("/"))
    return chosen[number - 1 :: of]


def _run(case: slow.Case, how: slow.How, *, keep: bool, starting: threading.Lock) -> slow.Answer:
    scratch, begin = Path(tempfile.mkdtemp(prefix="slow-")), time.monotonic()
    answer = slow.run(case, scratch, how, starting)
    growth = f"{100 * answer.growth:.0f}%" if answer.growth else "-"
    result = _measured(answer) if how.plain else _result(answer)
    print(f"{case.name:<30}{time.monotonic() - begin:>8.0f}{growth:>8}  {result}", flush=True)
    if keep or (not how.plain and _is_fault(answer)):
        print(f"  kept: {scratch}", flush=True)
    else:
        shutil.rmtree(scratch, ignore_errors=True)
    return answer


def _measured(answer: slow.Answer) -> str:
    planned = f", {100 * answer.share:.0f}% planned" if answer.planted else ""
    return answer.skipped or answer.broken or f"{answer.before_s:.3f} -> {answer.now_s:.3f} s a step{planned}"


def _is_fault(answer: slow.Answer) -> bool:
    if answer.skipped:
        return False
    if answer.broken or not answer.planted:
        return bool(answer.broken or answer.reports)
    score = answer.score
    return not score.named or score.wrong > 0 or score.line is False or score.reason is False or score.invented


def _result(answer: slow.Answer) -> str:
    if answer.skipped or answer.broken:
        return f"skipped: {answer.skipped}" if answer.skipped else f"broken: {answer.broken}"
    said = "; ".join(report.words for report in answer.reports)
    if not answer.planted:
        return f"REPORTED: {said}" if answer.reports else "no report"
    score = answer.score
    if not score.named:
        return f"OTHER RANK: {said}" if score.wrong else f"not named{f': {said}' if said else ''}"
    parts = [f"named after {score.seconds:.0f} s, {score.steps} steps{'' if score.in_time else ' (LATE)'}"]
    parts += [f"step {score.off:+d}"] if score.off is not None else []
    parts += ["line" if score.line else "OTHER LINE"] if score.line is not None else []
    parts += ["reason" if score.reason else "NO OR OTHER REASON"] if score.reason is not None else []
    parts += ["INVENTED REASON"] if score.invented else []
    parts += [f"{score.wrong} OTHER RANKS"] if score.wrong else []
    faults = [part for part in parts[1:] if part.isupper()]
    return ", ".join(parts) + (f": {said}" if faults else "")


def _sum_up(answers: list[slow.Answer]) -> int:
    found = slow.totals(answers)
    print(f"\n{'total':<44}{'count':>9}{'share':>7}{'aim':>6}")
    for total in found:
        count, missed = f"{total.count}/{total.of}", "" if total.reached else "  missed"
        print(f"{total.name:<44}{count:>9}{100 * total.share:>6.0f}%{100 * total.aim:>5.0f}%{missed}")
    print(f"median time from the onset to the report: {slow.typical_delay(answers):.0f} s")
    for word in ("broken", "skipped"):
        if names := [answer.name for answer in answers if getattr(answer, word)]:
            print(f"{word}: {', '.join(names)}")
    return 0 if all(total.reached for total in found) and not any(answer.broken for answer in answers) else 1


if __name__ == "__main__":
    sys.exit(main())
