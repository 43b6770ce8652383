"""Runs the hang zoo, every class with every rank as the culprit, and prints the verdicts.

python -m scripts.qa zoo                       # the whole matrix python -m scripts.qa zoo --only asleep,gil     # some
classes python -m scripts.qa zoo --ranks 4 --json zoo.json python -m scripts.qa zoo --nodes 2                 # the
ranks spread over nodes, in network namespaces (root) python -m scripts.qa zoo --first-word          # with nothing
configured: how soon is the right rank on the screen? python -m scripts.qa zoo --default --culprit 1  # with nothing
configured: which classes are proved, and what follows? python -m scripts.qa zoo --without-py-spy --culprit 0  # py-spy
is not allowed to trace: the ranks send their stacks python -m scripts.qa zoo --attach --culprit 1      # under plain
torchrun: what does safelaunch dump say 20 s later?
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.qa import zoo, zoo_nodes
from tests.support import broken_py_spy, netns

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
SOON_S = 15.0  # from the last progress to the right line on the screen
ATTACH_S = 25.0  # after the ranks' start: some 20 s after their last step


def main() -> int:
    words = _arguments()
    names = words.only.split(",") if words.only else list(zoo.BY_NAME)
    unknown = [name for name in names if name not in zoo.BY_NAME]
    if unknown:
        print(f"no such class: {', '.join(unknown)}; there are {', '.join(zoo.BY_NAME)}", file=sys.stderr)
        return 2
    cases = []
    absent: list[dict[str, object]] = []
    for name in names:
        specimen = zoo.BY_NAME[name]
        if why := specimen.unavailable(words.nodes):
            print(f"{name:<18} not run: {why}")
            absent.append({"class": name, "not run": why})
            continue
        world = words.ranks or specimen.ranks
        culprits = range(world) if words.culprit is None else [words.culprit]
        cases += [(specimen, culprit, world, words.nodes) for culprit in culprits]
    if words.default:
        return _by_default(cases, words.jobs, Path(words.json) if words.json else None)
    if words.first_word:
        return _first_words(cases, words.jobs, Path(words.json) if words.json else None)
    print(f"{'class':<18}{'culprit':<9}{'seconds':>7}  {'cause':<24}{'confidence':<11}verdict")
    begin = time.monotonic()
    keep = Path(words.keep) if words.keep else None
    with ThreadPoolExecutor(words.jobs) as pool:
        rows = []
        for row in pool.map(lambda case: _one(*case, keep, attach=words.attach, blind=words.without_py_spy), cases):
            rows.append(row)
            mark = "needs a recorder: " if words.attach and zoo.BY_NAME[str(row["class"])].recorder else ""
            print(
                f"{row['class']:<18}{row['culprit']}/{row['ranks']:<7}{row['seconds']:>7.1f}  {row['cause']:<24}"
                f"{row['confidence']:<11}{mark}{'; '.join(row['wrong']) or 'right'}",
                flush=True,
            )
    right = sum(not row["wrong"] for row in rows)
    print(f"{right} of {len(rows)} right, {time.monotonic() - begin:.0f} s")
    sure = sum(bool(row["wrong"]) and row["confidence"] == "high" for row in rows)
    plain = [row for row in rows if not zoo.BY_NAME[str(row["class"])].recorder]
    print(f"{sum(not row['wrong'] for row in plain)} of {len(plain)} right if no recorder is needed", end="; ")
    print(f"{sure} wrong at high, the longest {max((row['seconds'] for row in rows), default=0)} s")
    if words.json:
        Path(words.json).write_text(json.dumps([*rows, *absent], indent=1) + "\n")
    return 0 if right == len(rows) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="CLASSES", help="comma-separated; all by default")
    parser.add_argument("--ranks", type=int, help="ranks of each job; by default what the class needs")
    parser.add_argument("--nodes", type=int, default=1, help="nodes of each job, of at least a rank each [1]")
    parser.add_argument("--culprit", type=int, help="only this culprit; by default each rank in turn")
    parser.add_argument("--jobs", type=int, default=2, help="concurrent jobs [2]")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--first-word", action="store_true", help="measure the time to the first word instead")
    parser.add_argument("--default", action="store_true", help="print the answers with nothing configured instead")
    parser.add_argument(
        "--attach", action="store_true", help="attach to jobs of plain torchrun instead; seconds: of dump"
    )
    parser.add_argument("--without-py-spy", action="store_true", help="with a py-spy that may not trace")
    parser.add_argument("--keep", metavar="DIR", help="keep bundles and output below DIR")
    words = parser.parse_args()
    if words.nodes > 1 and (reason := netns.cannot()):
        parser.error(reason)
    return words


def _first_words(cases: list[tuple[zoo.Specimen, int, int, int]], jobs: int, file: Path | None) -> int:
    print(f"{'class':<18}{'culprit':<9}{'seconds':>7}  first word")
    rows = []
    with ThreadPoolExecutor(jobs) as pool:
        for row in pool.map(lambda case: _first_word(*case[:3]), cases):
            rows.append(row)
            wrong = f"WRONG: {'; '.join(row['wrong'])}: " if row["wrong"] else ""
            print(
                f"{row['class']:<18}{row['culprit']}/{row['ranks']:<7}{row['seconds']:>7.1f}  {wrong}{row['words']}",
                flush=True,
            )
    soon = sum(not row["wrong"] and row["seconds"] <= SOON_S for row in rows)
    print(f"{soon} of {len(rows)} within {SOON_S:g} s and right")
    if file is not None:
        file.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if soon >= 0.95 * len(rows) else 1


def _first_word(specimen: zoo.Specimen, culprit: int, world: int) -> dict[str, Any]:
    scratch = Path(tempfile.mkdtemp(prefix="zoo-"))
    with zoo.start(specimen, culprit, scratch, ranks=world, configured=False) as job:
        word = zoo.first_word(job)
    shutil.rmtree(scratch, ignore_errors=True)
    wrong = zoo.judge_word(specimen, culprit, word, ranks=world)
    row = {"class": specimen.name, "culprit": culprit, "ranks": world, "wrong": wrong}
    return {**row, "seconds": word.quiet_s if word else 0.0, "words": word.words if word else ""}


ANSWER_S = 150.0  # the floor of the threshold is a minute
KNOWN = ("--after=60",)  # steps, from which the threshold is learned
_WORD, _WORKS = re.compile(r"^safelaunch: quiet for (\d+) s", re.MULTILINE), "but the job is working"


def _by_default(cases: list[tuple[zoo.Specimen, int, int, int]], jobs: int, file: Path | None) -> int:
    """Every class of which a wait of the job's own is the cause has to be proved, and no other one is ended."""
    print(f"{'class':<18}{'culprit':<9}{'answer':<10}{'word s':>7}{'bundle s':>9}{'end s':>7}  verdict")
    rows = []
    with ThreadPoolExecutor(jobs) as pool:
        for row in pool.map(lambda case: _answer(*case[:3]), cases):
            rows.append(row)
            times = "".join(f"{row[name] or '-':>{width}}" for name, width in (("word", 7), ("bundle", 9), ("end", 7)))
            print(
                f"{row['class']:<18}{row['culprit']}/{row['ranks']:<7}{row['answer']:<10}{times}  {row['verdict']}",
                flush=True,
            )
    if file is not None:
        file.write_text(json.dumps(rows, indent=1) + "\n")
    counts = Counter(str(row["answer"]) for row in rows)
    print(", ".join(f"{count} {answer}" for answer, count in counts.most_common()))
    return 0


def _answer(specimen: zoo.Specimen, culprit: int, world: int) -> dict[str, Any]:
    """Returns the watch's reports about one hang, and their times in seconds since the last step."""
    scratch = Path(tempfile.mkdtemp(prefix="zoo-"))
    row: dict[str, Any] = {"class": specimen.name, "culprit": culprit, "ranks": world, "answer": "none yet"}
    row |= {"word": 0, "bundle": 0, "end": 0, "verdict": "-"}
    with zoo.start(specimen, culprit, scratch, ranks=world, configured=False, more=KNOWN) as job:
        try:
            job.until(lambda: job.bundles() or _WORKS in job.stderr, "an answer", ANSWER_S, every_s=0.5)
        except AssertionError:
            pass  # before the first step, the threshold is half an hour
        if _WORKS in job.stderr:
            row["answer"] = "alive"
        for bundle in job.bundles():
            verdict, watch = bundle.verdict, bundle.json("manifest.json")["watch"]
            row |= {"answer": "proved" if verdict["proof"] else watch["answer"], "bundle": round(watch["stalled_s"])}
            row["verdict"] = f"{verdict['outcome']}: {verdict['cause']} ({verdict['confidence']})"
            if verdict["outcome"] == "hang":
                job.wait()
                row["end"] = round(watch["stalled_s"] + time.time() - bundle.json("manifest.json")["written_unix_s"])
        found = _WORD.search(job.stderr)
        row["word"] = int(found[1]) if found is not None else 0
    shutil.rmtree(scratch, ignore_errors=True)
    return row


def _one(
    specimen: zoo.Specimen,
    culprit: int,
    world: int,
    nodes: int,
    keep: Path | None,
    *,
    attach: bool = False,
    blind: bool = False,
) -> dict[str, Any]:
    name = f"{specimen.name}-{culprit}of{world}"
    scratch = Path(tempfile.mkdtemp(prefix="zoo-"))
    if keep is not None:
        scratch.rmdir()
        scratch = (keep / name).absolute()
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    row: dict[str, Any] = {"class": specimen.name, "culprit": culprit, "ranks": world, "nodes": nodes}
    begin = time.monotonic()
    try:
        if attach:
            wrong, verdict, begin = _attach(specimen, culprit, world, scratch)
        else:
            wrong, verdict = _run(specimen, culprit, world, nodes, scratch, blind=blind)
    except AssertionError as error:  # the job did not end; the message contains its output
        wrong, verdict = [str(error).splitlines()[0]], {}
    row |= {"seconds": round(time.monotonic() - begin, 1), "cause": verdict.get("cause", "-")}
    row |= {"named": [one["rank"] for one in verdict.get("culprits", ())]}
    row |= {"confidence": verdict.get("confidence", "-"), "summary": verdict.get("summary", ""), "wrong": wrong}
    if keep is None:
        shutil.rmtree(scratch, ignore_errors=True)
    return row


def _attach(specimen: zoo.Specimen, culprit: int, world: int, scratch: Path) -> tuple[list[str], dict[str, Any], float]:
    """Returns what is wrong, the verdict, and when the dump was asked for."""
    with zoo.start(specimen, culprit, scratch, ranks=world, launcher=TORCHRUN) as job:
        job.until(lambda: len(job.ranks()) == world, "the ranks", every_s=0.5)
        time.sleep(ATTACH_S)
        before, begin = job.ranks(), time.monotonic()
        words = ["dump", f"--pid={job.process.pid}", f"--bundle-dir={job.bundle_dir}"]
        own = {**os.environ, "XDG_RUNTIME_DIR": str(job.runtime)}
        done = subprocess.run([sys.executable, "-m", "safelaunch", *words], env=own, capture_output=True, text=True)
        took = time.monotonic() - begin
        verdict = job.bundles()[0].verdict if done.returncode == 0 else {}
        wrong = zoo.judge_place(specimen, culprit, verdict, world) if verdict else [done.stderr]
        if job.process.poll() is not None or job.ranks() != before:
            wrong.append("the job was disturbed")
    return wrong, verdict, time.monotonic() - took


def _run(
    specimen: zoo.Specimen, culprit: int, world: int, nodes: int, scratch: Path, *, blind: bool = False
) -> tuple[list[str], dict[str, Any]]:
    """Returns what is wrong, and the verdict."""
    if nodes == 1:
        interpreter = broken_py_spy.without_rights(scratch / "bare") if blind else ()
        env = {"PATH": "/usr/bin:/bin"} if blind else None
        with zoo.start(specimen, culprit, scratch, ranks=world, interpreter=interpreter, env=env) as job:
            results = [job.wait()]
        wrong = zoo.judge(specimen, culprit, results[0], ranks=world)
    else:
        results = zoo_nodes.run(specimen, culprit, scratch, ranks=world, nodes=nodes)
        wrong = zoo_nodes.judge(specimen, culprit, results, ranks=world)
    return wrong, next((one.verdict for one in results if len(one.bundles) == 1), {})


if __name__ == "__main__":
    sys.exit(main())
