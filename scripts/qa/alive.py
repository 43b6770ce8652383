"""Runs healthy programs of every kind under safelaunch, which must end and blame none of them; prints a table.

python -m scripts.qa alive                          # all, by default settings: about an hour on 2 cores python -m
scripts.qa alive --floor 5 --quiet 12     # the quick form python -m scripts.qa alive --explicit 8             # only
programs that work while they are quiet, with --stall-timeout 8 python -m scripts.qa alive --only one_sleep,a_manager
--compare torchrun python -m scripts.qa alive --attach                 # under plain torchrun, while safelaunch dump
--pid looks at them
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tests.qa import alive
from tests.support import netns

SPINS = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**5))"
INSTALL_S = 300.0


def main() -> int:
    words, parser = _arguments()
    if words.nodes > 1 and (reason := netns.cannot()):
        parser.error(reason)
    cases = _chosen(words, parser)
    if words.list:
        print("\n".join(case.name for case in cases))
        return 0
    needs = sorted({package for case in cases for package in case.needs})
    own = [f"--stall-floor={words.floor:g}"] if words.floor else []
    own += [f"--stall-timeout={words.explicit:g}"] if words.explicit else []
    how = alive.How(
        quiet_s=words.quiet or (words.explicit * 3 + 1 if words.explicit else 90.0),
        own=tuple(own),
        libraries=_libraries(words.venv, needs) if needs else None,
        nodes=words.nodes,
        plain=words.compare == "torchrun",
        attach=words.attach,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the network and the load go, too
    print(f"{'program':<44}{'seconds':>8}  answer", flush=True)
    with ExitStack() as stack:
        for _ in range(words.load):
            stack.callback(subprocess.Popen([sys.executable, "-c", SPINS]).kill)
        with ThreadPoolExecutor(words.jobs) as pool:
            answers = list(pool.map(partial(_run, how=how, keep=words.keep), cases))
    _sum_up(answers)
    if words.json is not None:
        words.json.write_text(json.dumps([answer.as_json() for answer in answers], indent=1) + "\n")
    return 1 if any(answer.wrong for answer in answers) else 0


def _arguments() -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAMES", help="comma-separated; a part of a name will do")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="run the Kth of N parts")
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="concurrent jobs, which mostly wait (4)")
    parser.add_argument("--quiet", type=float, default=0.0, metavar="SECONDS", help="length of the quiet spell (90)")
    parser.add_argument("--floor", type=float, default=0.0, metavar="SECONDS", help="--stall-floor (the default, 60)")
    parser.add_argument(
        "--explicit", type=float, default=0.0, metavar="SECONDS", help="--stall-timeout; only programs that work"
    )
    parser.add_argument("--load", type=int, default=0, metavar="N", help="busy processes beside (0)")
    parser.add_argument("--nodes", type=int, default=1, help="2: each job on two nodes, in network namespaces (root)")
    parser.add_argument("--compare", choices=("torchrun",), help="run them without watching instead")
    parser.add_argument("--attach", action="store_true", help="attach to jobs of plain torchrun instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the table")
    parser.add_argument("--keep", action="store_true", help="keep every job's directory, not only failed ones")
    parser.add_argument("--list", action="store_true", help="print the names and exit")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument(
        "--venv",
        type=Path,
        default=cache / "safelaunch-alive",
        metavar="DIR",
        help="where the libraries go",
    )
    return parser.parse_args(), parser


def _chosen(words: argparse.Namespace, parser: argparse.ArgumentParser) -> list[alive.Case]:
    cases = [case for case in alive.CASES.values() if case.works or not words.explicit]
    parts = [part.strip() for part in words.only.split(",") if part.strip()]
    if unknown := [part for part in parts if not any(part in case.name for case in cases)]:
        parser.error(f"no such program: {', '.join(unknown)} (--list has the names)")
    chosen = [
        case
        for case in cases
        if not parts or any(case.name == part or (part not in alive.CASES and part in case.name) for part in parts)
    ]
    number, of = map(int, words.part.split("/"))
    return chosen[number - 1 :: of]


def _libraries(venv: Path, needs: list[str]) -> Path:
    """Installs missing packages into an environment next to this one, which shares this one's packages."""
    python = venv / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    its = Path(subprocess.run([python, "-c", where], stdout=subprocess.PIPE, text=True, check=True).stdout.strip())
    ours = subprocess.run([sys.executable, "-c", where], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    (its / "project.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    for package in needs:
        if (its / alive.MODULES.get(package, package)).exists():
            continue
        install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--only-binary=:all:", package]
        try:
            subprocess.run(install, timeout=INSTALL_S, check=True, capture_output=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"{package} is not installed: {error}", file=sys.stderr)
    return its


def _run(case: alive.Case, how: alive.How, *, keep: bool) -> alive.Answer:
    scratch, begin = Path(tempfile.mkdtemp(prefix="alive-")), time.monotonic()
    answer = alive.run(case, scratch, how)
    shown = f"skipped: {answer.skipped}" if answer.skipped else answer.wrong or "unharmed"
    shown += f" [bundle: {answer.suspect}]" if answer.suspect else ""
    shown += f" [slow: {answer.slow}]" if answer.slow else ""
    shown += f" [word: {answer.word[:90]}]" if answer.word else ""
    print(f"{case.name:<44}{time.monotonic() - begin:>8.1f}  {shown}", flush=True)
    if answer.wrong or keep:
        print(f"  kept: {scratch}", flush=True)
    else:
        shutil.rmtree(scratch, ignore_errors=True)
    return answer


def _sum_up(answers: list[alive.Answer]) -> None:
    ran = [answer for answer in answers if not answer.skipped]
    counts = [f"{sum(word in answer.wrong for answer in ran)} {word}" for word in ("ended", "broken", "accused")]
    first, looks = sum(bool(answer.word) for answer in ran), sum(answer.looks for answer in ran)
    print(f"\n{len(ran)} healthy programs: {', '.join(counts)}; {first} with a first word", end="")
    print(f"; {looks} looks" if looks else "", end="")
    print(f"; {len(answers) - len(ran)} skipped" if len(ran) < len(answers) else "")


if __name__ == "__main__":
    sys.exit(main())
