"""No file of a bundle contains a secret in any encoding, and nothing is written without redaction."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

import safelaunch
from safelaunch import addons
from safelaunch.system import console
from safelaunch.system.redaction.redactor import Redactor
from tests.support import leaks

PACKAGE = Path(safelaunch.__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_encoded_secret_is_in_no_artifact(part: int, tmp_path: Path) -> None:
    """The real writer is used; scripts/qa/attacks.py also tries each encoding alone."""
    encodings = leaks.ENCODINGS[part::4]
    text = leaks.said(encodings)
    secrets = leaks.SECRETS
    assert set(leaks.leaks(text.encode(), secrets)) == set(secrets), "the search finds them where they are"
    written = leaks.write(text, tmp_path)
    files = written.files()
    missing = json.loads(files["manifest.json"])["missing"]
    assert set(files) >= leaks.EXPECTED, missing
    assert {name: leaked for name, data in files.items() if (leaked := leaks.leaks(data, secrets))} == {}
    assert b"[redacted]" in files["ranks/0/log_tail.txt"] and b"it is" in files["ranks/0/log_tail.txt"]
    assert b"/home/me/train.py" in files["ranks/0/stack.txt"] and b"rank 0" in files["(screen)"]


@pytest.mark.slow
def test_secret_shape_is_in_no_artifact(tmp_path: Path) -> None:
    text = "\n".join(
        f"it is {encoding.write(shape)} now"
        for encoding in leaks.ENCODINGS
        if encoding.name in leaks.OF_SHAPES
        for shape in leaks.SHAPES.values()
    )
    files = leaks.write(text, tmp_path).files()
    assert {name: leaked for name, data in files.items() if (leaked := leaks.leaks(data, leaks.SHAPES))} == {}


# --- output without redaction -----------------------------------------------------------------------------------------

# Modules that can write files or print, and why their text needs no further redaction.
WRITERS = {
    "bundle.staging": "every file of a bundle: it has the redactor",
    "system.files": "data of its callers, which are listed here",
    "system.console": "every displayed line: it has the filter",
    "bundle.copier": "copies files that staging has written; its messages go through a pipe",
    "capture.gpu": "a separate program, read through a pipe",
    "leases.inventory": "a separate program, read through a pipe",
    "cli.help": "own text, before anything else is imported",
    "addons.reproduce.command": "filtered text",
    "addons.record.command": "text that the supervisor has cleaned",
    "capture.command": "stderr of a separate program, to read it back",
    "cli.gpus": "rich, with cells that have passed",
    "addons.sweep.screen": "rich, with cells that have passed",
    "cli.table": "rich, with cells that have passed",
    "cli": "an exit code",
    "addons.sweep.summary": "parameters and metrics, cleaned one by one",
    "addons.sweep.journal": "names and outcomes of jobs",
    "addons.sweep.attempt_files": "ids and outcomes of jobs",
    "addons.sweep.batch": "command and environment of a job, in private files of the sweep",
    "addons.consistency.probe": "inside the ranks, into a page: digests and names of parameters",
    "addons.consistency.monitor": "names of parameters, in the run directory",
    "job.paths": "owner of a run directory",
    "job.guardian": "pids for the guardian",
    "job.guarding": "wait statuses for the supervisor, its own name",
    "job.remains": "pids of the job",
    "job.controlgroup": "pids into the kernel's files",
    "cli.diagnose": "text that console has filtered, in the child that read it",
    "bundle.reading.guard": "a child's answer, through a pipe",
    "job.process": "an errno, and a go, through pipes",
    "supervise.early": "cleaned early looks, for status",
    "supervise.judge_process": "cleaned evidence for a child process, and its answer through a pipe",
    "leases.*": "locks and their holders: a command line that redact_argv has cleaned",
    "bundle.reading.archive": "unpacks a given bundle, to read it",
    "bundle.reading.run_directory": "copies a run's pages, to read them",
    "bundle.reading.locate": "saves standard input, to read it",
    "beacon.*": "inside the ranks: their output, before redaction",
}
_PRINTS = {"print", "write_text", "write_bytes", "replace_file"}


def _writes(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in _PRINTS:
        return True
    if name == "write":  # of os, a stream or an open file
        return not (isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) in ("incident", "summary"))
    if name in ("open", "fdopen", "NamedTemporaryFile"):
        words = [*call.args, *(keyword.value for keyword in call.keywords)]
        modes = [word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)]
        return any(re.fullmatch("[rbt]*[wxa+][rbt+]*", mode) for mode in modes)
    return False


def is_missing(module: str) -> bool:
    package, _, rest = module.partition(".")
    return package == "addons" and not addons.is_present(rest.partition(".")[0])


def test_only_listed_modules_write_or_print() -> None:
    leaked = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE)
        module = ".".join([*inside.parts[:-1], *([] if inside.stem == "__init__" else [inside.stem])])
        if inside.as_posix().startswith(("cli/demos/", "job/launcher/")):
            continue
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        if lines := [call.lineno for call in calls if _writes(call)]:
            leaked[module] = lines
    allowed = {
        name for name in leaked if name in WRITERS or any(name.startswith(w[:-1]) for w in WRITERS if w.endswith(".*"))
    }
    assert {name: lines for name, lines in leaked.items() if name not in allowed} == {}
    present = {name for name in WRITERS if not name.endswith(".*") and not is_missing(name)}
    assert present <= set(leaked), "the table lists modules that write nothing"


def test_staging_redacts_every_kind_of_artifact(tmp_path: Path) -> None:
    """Only a redactor that knows the secret protects each way into a bundle."""
    from safelaunch.bundle.staging import Staging
    from safelaunch.model import Artifact

    secret = "horse-battery-77"
    source = tmp_path / "source.log"
    source.write_text(f"a {secret}\n")
    staging = Staging(tmp_path / "b", Redactor((secret,)))
    staging.add(Artifact(f"{secret}.txt", secret, 0.0, note=secret), f"a {secret}")
    staging.add(Artifact("a.bin", "x", 0.0), f"a {secret}".encode())
    staging.add(Artifact("a.missing", "x", 0.0, missing=secret), None)
    staging.add_json(Artifact("a.json", "x", 0.0), {secret: [secret, {"k": secret}]})
    staging.add_report(Artifact("a.html", "x", 0.0), f"<p>{secret}</p>")
    staging.add_file(Artifact("copied.log", "x", 0.0), source)
    staging.add_file(Artifact(f"{secret}.dump", "x", 0.0), source, dump=True)
    staging.finish({"artifacts": staging.artifacts, "notes": [secret]})
    files = {path.name: path.read_text() for path in (tmp_path / "b").rglob("*") if path.is_file()}
    assert len(files) == 7
    assert [name for name, text in files.items() if secret in text or secret in name] == []


def test_function_names_keep_short_secrets_thread_names_do_not() -> None:
    from safelaunch.capture.redaction import without_secrets
    from safelaunch.model import Frame, Thread

    thread = Thread((Frame("/home/me/train.py", 7, "hunter2"),), name="with hunter2")
    cleaned = without_secrets(thread, Redactor(("hunter2",)))
    assert (cleaned.frames, cleaned.name) == (thread.frames, "with [redacted]")
    clean = Thread(thread.frames, name="main")
    assert without_secrets(clean, Redactor(("hunter2",))) is clean


def test_console_output_is_redacted(capfd: pytest.CaptureFixture[str]) -> None:
    console.redact.use(Redactor(("horse-battery-77",)).text)
    try:
        console.say("a horse-battery-77 b")
        console.show("c horse-battery-77 d")
        console.show_json({"horse-battery-77": ["e horse-battery-77", 1, None, True]})
    finally:
        console.redact.use(None)
    out, err = capfd.readouterr()
    assert err == "safelaunch: a [redacted] b\n"
    assert "horse" not in out and out.startswith("c [redacted] d\n")
