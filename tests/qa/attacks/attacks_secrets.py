"""Every kind of secret, in every encoding, in everything that safelaunch writes and shows.

Most attacks run the real writer on artificial evidence: each looks for one kind of secret in one encoding, in all
artifacts. The others run real jobs that print, raise and store their secrets everywhere, and hang or crash.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import random as rnd
import shutil
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path

from safelaunch.system.redaction.job_secrets import secret_values
from safelaunch.system.redaction.redact import redact_text
from safelaunch.system.redaction.redactor import Redactor
from tests.qa.attacks.attack import Attack
from tests.support import leaks
from tests.support.jobs import Job, Result

LOUD = Path(__file__).parent / "loud.py"
MEGABYTE = 1 << 20
SIGNS = "!@#$%^&*()_+-=[]{}|;:,.<>?'\"\\/~"
# Names and phrases that mark an otherwise unknown secret.
PLACES = (
    "password={}", "'password': '{}'", '"api_key": "{}"', '\\"secret\\": \\"{}\\"', "--token {}", "--api-key={}",
    "export GH_PAT={}", "SAS_SIG={}", "USER_SALT={}", "signing_key={}", "MYPASSPHRASE={}", "pw={}", "Pwd={};",
    "Authorization: Bearer {}", "X-Auth-Token: {}", "Cookie: a=b; sid={}", "https://me:{}@host/x", "redis://:{}@h:1/0",
    "curl -u me:{} https://h", "[('HF_TOKEN', '{}')]", "os.environ['DB_PASSWORD'] = '{}'",
    "AccountName=me;AccountKey={};Suffix=x", "https://h/c?sv=1&sig={}&se=2", "failed\\nHF_TOKEN={}\\n",
)  # fmt: skip
PLAIN = (
    '  File "/home/me/proj/train.py", line {n}, in train_step', "step {n}: loss 0.{n}", "rank {n} of 512", "pid {n}",
    "torch.Size([{n}, 512])", "/data/runs/3fa85f64b7d6c1e2a9{n}/step_{n}.pt", "node-{n}.cluster.example",
    "#{n} all_reduce", "{n} ms, {n} tokens/s", "commit 3fa85f64b7d6c1e2a93fa85f64b7d6c1e2a9{n}", "localhost:{n}",
    "sizes ({n}, 3)",
)  # fmt: skip


def attacks(count: int, random: rnd.Random) -> Iterator[Attack]:
    """Yields all pairs of encodings and secrets, real jobs, and ``count`` of each random kind."""
    for encoding in leaks.ENCODINGS:
        for name in leaks.SECRETS:
            if encoding.short or name not in leaks.SHORT:
                yield Attack(f"{name}, {encoding.name}", partial(_of_the_job, encoding, name))
    for encoding in leaks.ENCODINGS:
        for name in leaks.SHAPES if encoding.name in leaks.OF_SHAPES else ():
            yield Attack(f"{name} (looks), {encoding.name}", partial(_by_its_looks, encoding, name))
    for number in range(count):
        yield Attack(f"drawn secret {number}", partial(_drawn, random.randrange(2**32)))
        yield Attack(f"place {number}", partial(_place, random.randrange(2**32)))
        yield Attack(f"two encodings {number}", partial(_nested, random.randrange(2**32)))
        yield Attack(f"cut off {number}", partial(_cut_off, random.randrange(2**32)))
        yield Attack(f"plain text {number}", partial(_plain, random.randrange(2**32)))
    for number in range(max(1, count // 5)):
        yield Attack(f"a megabyte {number}", partial(_long, random.randrange(2**32)))
    for how in ("hangs", "crashes", "dump", "colaunch"):
        yield Attack(f"a job that {how}", partial(_job, how))


# --- by the real writer -----------------------------------------------------------------------------------------------


@cache
def _files(encoding: leaks.Encoding, shapes: bool) -> dict[str, bytes]:
    """Returns the files of a job that writes all of its secrets in this encoding."""
    text = leaks.said([encoding])
    if shapes:
        text = "\n".join(f"it is {encoding.write(shape)} now" for shape in leaks.SHAPES.values())
    scratch = Path(tempfile.mkdtemp(prefix="attack-"))
    try:
        return leaks.write(text, scratch).files()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _of_the_job(encoding: leaks.Encoding, name: str, _: Path) -> str:
    return _found(_files(encoding, False), {name: leaks.SECRETS[name]})


def _by_its_looks(encoding: leaks.Encoding, name: str, _: Path) -> str:
    return _found(_files(encoding, True), {name: leaks.SHAPES[name]})


def _found(files: dict[str, bytes], secrets: dict[str, str]) -> str:
    return ", ".join(f"{found} in {name}" for name, data in files.items() for found in leaks.leaks(data, secrets))


# --- drawn at random --------------------------------------------------------------------------------------------------


def _secret(random: rnd.Random, least: int = 4) -> str:
    """Draws a secret: letters, digits, signs, other scripts, a passphrase, a key in base64 or hexadecimal."""
    length = random.randint(max(least, 4), 40)
    kinds = (
        lambda: "".join(random.choices(string.ascii_letters + string.digits, k=length)),
        lambda: "".join(random.choices(string.ascii_letters + string.digits + SIGNS, k=length)),
        lambda: "".join(random.choices("äöüßéñ漢字ключ€" + string.ascii_letters, k=length)),
        lambda: " ".join("".join(random.choices(string.ascii_lowercase, k=6)) for _ in range(4)),
        lambda: base64.b64encode(random.randbytes(length)).decode(),
        lambda: random.randbytes(length).hex(),
    )  # fmt: skip
    return random.choice(kinds)().strip(" \"'=;:") + "7"


def _drawn(seed: int, _: Path) -> str:
    """A secret of a random kind under a random name, written in every encoding."""
    random = rnd.Random(seed)
    secret = _secret(random, 8)
    name = random.choice(list(leaks.ENVIRONMENT)[:13])
    redactor = Redactor(secret_values({name: secret}, []))
    for encoding in leaks.ENCODINGS:
        said = f"it is {encoding.write(secret)} now"
        for text in (redactor.job_text(said), redactor.text(said)):
            if leaks.leaks(text.encode(), {"secret": secret}):
                return f"{name}={secret!r}, {encoding.name}: {text!r}"
    return ""


def _place(seed: int, _: Path) -> str:
    """A secret that only the job knows, recognisable by the text around it, within another text's escapes."""
    random = rnd.Random(seed)
    secret = "".join(random.choices(string.ascii_letters + string.digits, k=random.randint(8, 32))) + "a7Q"
    place = random.choice(PLACES).format(secret)
    around = random.choice(
        (str, json.dumps, repr, lambda text: json.dumps(json.dumps(text)), lambda text: f"x\n{text}\ny")
    )
    said = around(place)
    text = redact_text(said)
    return f"{said!r}: {text!r}" if leaks.leaks(text.encode(), {"secret": secret}) else ""


def _nested(seed: int, _: Path) -> str:
    """An encoding within another one."""
    random = rnd.Random(seed)
    secret = _secret(random, 8)
    inner, outer = random.sample(leaks.ENCODINGS, 2)
    hidden = inner.name.startswith(("base64", "hexa", "HEXA"))
    if hidden and outer.name.startswith(("base64", "hexa", "HEXA", "in a word")):
        return ""  # double encoding is deliberate hiding, and so is base64 within letters that are none of it
    if {inner.name, outer.name} == {"colours", "zero width"}:
        return ""  # a terminal shows no such colours
    said = f"it is {outer.write(inner.write(secret))} now"
    text = Redactor(secret_values({"A_SECRET": secret}, [])).job_text(said)
    return (
        f"{secret!r}, {inner.name} in {outer.name}: {text!r}" if leaks.leaks(text.encode(), {"secret": secret}) else ""
    )


def _cut_off(seed: int, _: Path) -> str:
    """A text that ends or begins within a secret."""
    random = rnd.Random(seed)
    secret = "".join(random.choices(string.ascii_letters + string.digits, k=random.randint(16, 40)))
    at = random.randint(8, len(secret) - 8)
    redactor = Redactor(secret_values({"A_SECRET": secret}, []))
    for said, part in ((f"it is {secret[:at]}", secret[:at]), (f"{secret[at:]} it was", secret[at:])):
        if part in redactor.job_text(said):
            return f"{said!r} of {secret!r}"
    return ""


def _plain(seed: int, _: Path) -> str:
    """Text that is not secret must stay, even if it contains a number or word that is a secret elsewhere."""
    random = rnd.Random(seed)
    number = str(random.randint(1000, 99999))
    redactor = Redactor(
        secret_values({"DOOR_PIN_CODE": number, "DB_PASSWORD": "train", "HF_TOKEN": "hf_" + "aB3" * 10}, [])
    )
    text = "\n".join(random.sample(PLAIN, 5)).replace("{n}", number)
    return "" if redactor.job_text(text) == text else f"{text!r}: {redactor.job_text(text)!r}"


def _long(seed: int, _: Path) -> str:
    """One line of a megabyte, full of possible starts of secrets, must take seconds at most."""
    random = rnd.Random(seed)
    alphabet = (
        *PLACES,
        *leaks.SHAPES.values(),
        "eyJ",
        "-----BEGIN ",
        "-----END PRIVATE KEY-----",
        "A" * 76,
        '"',
        "\\",
        "a://",
        " ",
    )
    unit = "".join(word[: random.randint(1, 40)] for word in random.choices(alphabet, k=random.randint(1, 4)))
    text = (unit * (MEGABYTE // len(unit) + 1))[:MEGABYTE]
    redactor = Redactor(secret_values(leaks.ENVIRONMENT, []))
    begin = time.process_time()
    redactor.job_text(text[: MEGABYTE // 4])
    quarter_s = time.process_time() - begin
    redactor.job_text(text)
    took_s = time.process_time() - begin - quarter_s
    return f"{took_s:.1f} s, {took_s / quarter_s:.1f} times a quarter of it: {unit!r}" if took_s > 8 * quarter_s else ""


# --- real jobs --------------------------------------------------------------------------------------------------------


def _job(how: str, scratch: Path) -> str:
    """Checks bundles, archives, answers of status and dump, journals, summaries, and safelaunch's own output."""
    said = leaks.said(leaks.ENCODINGS) + "\n" + "\n".join(leaks.SHAPES.values())
    (scratch / "said").write_text(said)
    environment: dict[str, str | None] = {**leaks.ENVIRONMENT, "LOUD": os.fspath(scratch / "said"), "LOUD_HOW": how}
    own = ["--stall-timeout=4", "--preset=hang-debug", "--nproc-per-node=2", LOUD, *leaks.ARGUMENTS[1:]]
    if how == "colaunch":
        own = ["colaunch", "--grid", f"auth_token={leaks.SECRETS['HF_TOKEN']}", "--", *own, "--of", "{auth_token}"]
    answers = []
    with Job([*own], scratch, env=environment) as job:
        if how == "dump":
            job.until(lambda: len(list(scratch.glob("loud-*"))) == 2, "both ranks")
            answers = [
                _asked(job, *words) for words in (["status", "--json"], ["status"], ["dump", "--json"], ["dump"])
            ]
            (scratch / "end").touch()
        result = job.wait()
    secrets = {**leaks.SECRETS, **leaks.SHAPES}
    files = _left(result, scratch)
    shown = [result.said, *answers, *([result.stdout] if how == "colaunch" else [])]
    files["(screen)"] = "\n".join(shown).encode()
    if not any("verdict.json" in name for name in files):
        return f"there is no bundle: {result.stderr[-500:]}"
    return _found(files, secrets)


def _asked(job: Job, *words: str) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SAFELAUNCH_")}
    done = subprocess.run(
        [sys.executable, "-m", "safelaunch", *words],
        env={**environ, "XDG_RUNTIME_DIR": os.fspath(job.runtime)},
        cwd=job.scratch,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout + done.stderr


def _left(result: Result, scratch: Path) -> dict[str, bytes]:
    # Every file of every bundle and of a sweep, except the job's own output.
    roots: Sequence[Path] = [bundle.path for bundle in result.bundles]
    sweeps = scratch / "safelaunch-sweeps"
    paths = itertools.chain(*(root.rglob("*") for root in roots), sweeps.rglob("*") if sweeps.is_dir() else ())
    found = {str(path): path.read_bytes() for path in paths if path.is_file() and not path.name.startswith("attempt-")}
    return {**found, "(names)": "\n".join(found).encode()}
