"""What is taken for a secret, and what must stay readable."""

from __future__ import annotations

import json
import time

import pytest

from safelaunch.capture.job_secrets import Redactor, secret_values
from safelaunch.capture.redact import REDACTED, is_secret_name, redact_argv, redact_env, redact_text

SECRET_NAMES = [
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "GITHUB_TOKEN",
    "WANDB_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_ACCESS_KEY_ID",
    "AWS_SESSION_TOKEN",
    "OPENAI_API_KEY",
    "NEPTUNE_API_TOKEN",
    "COMET_API_KEY",
    "DB_PASSWORD",
    "PGPASSWORD",
    "MYSQL_PWD",
    "SENTRY_DSN",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_CLIENT_SECRET",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "SSH_PRIVATE_KEY",
    "BASIC_AUTH",
    "COOKIE",
    "SLACK_WEBHOOK_URL",
    "JWT",
    "dbPassword",
    "apiKey",
    "--api-key",
    "--hf-token",
    "NGC_KEY",
    "KUBE_TOKEN",
    "passwd",
]

PLAIN_NAMES = [
    "TOKENIZERS_PARALLELISM",
    "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "PWD",
    "OLDPWD",
    "PATH",
    "HOME",
    "MAX_TOKENS",
    "--max-tokens",
    "tokens_per_batch",
    "pad_token_id",
    "eos_token",
    "SSH_AUTH_SOCK",
    "XDG_SESSION_ID",
    "XDG_SESSION_TYPE",
    "DBUS_SESSION_BUS_ADDRESS",
    "DESKTOP_SESSION",
    "OMP_NUM_THREADS",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "author",
    "keyboard",
    "monkey",
    "PYTHONPATH",
    "sort_key",
    "compass",
    "bypass",
]


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_secret_names(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_plain_names(name: str) -> None:
    assert not is_secret_name(name)


# Built from pieces, so that no scanner takes this file for a leak.
SECRETS = [
    "ghp_" + "a1B2" * 9,
    "gho_" + "a1B2" * 9,
    "github_pat_" + "11ABCDEFG0" * 4,
    "hf_" + "abcdEFGH" * 4,
    "sk-" + "abcd1234" * 5,
    "sk-proj-" + "abcd_1234-" * 5,
    "xoxb-" + "123456789012-abcdef",
    "AKIA" + "ABCDEFGH12345678",
    "AIza" + "B" * 35,
    "glpat-" + "abcdefghij0123456789",
    "eyJ" + "hbGciOiJIUzI1NiJ9" + ".eyJ" + "zdWIiOiIxMjM0NTY3ODkwIn0" + ".c2lnbmF0dXJl",
]


@pytest.mark.parametrize("secret", SECRETS)
def test_secrets_by_shape(secret: str) -> None:
    assert redact_text(f"loading with {secret} now") == f"loading with {REDACTED} now"
    assert redact_env({"NOTHING_SPECIAL": secret}) == {"NOTHING_SPECIAL": REDACTED}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("postgres://me:hunter2@db:5432/x", f"postgres://me:{REDACTED}@db:5432/x"),
        ("https://:pw@host/", f"https://:{REDACTED}@host/"),
        ("git clone https://0123456789abcdef0123@host/r", f"git clone https://{REDACTED}@host/r"),
        ("Authorization: Bearer abc.def", f"Authorization: Bearer {REDACTED}"),
        ("{'Authorization': 'Bearer abcdef'}", f"{{'Authorization': 'Bearer {REDACTED}'}}"),
        ("password=hunter2 user=me", f"password={REDACTED} user=me"),
        ("password: hunter2", f"password: {REDACTED}"),
        ('{"api_key": "s3cr3t", "lr": 0.1}', f'{{"api_key": {REDACTED}, "lr": 0.1}}'),
        ("run --api-key=abc --lr 0.1", f"run --api-key={REDACTED} --lr 0.1"),
        ("run --token abc --lr 0.1", f"run --token {REDACTED} --lr 0.1"),
        ("https://h/p?sig=1&token=abc", f"https://h/p?sig=1&token={REDACTED}"),
        ("Cookie: a=b", f"Cookie: {REDACTED}"),
        (
            "a\n-----BEGIN RSA PRIVATE KEY-----\nMIIE\nxyz\n-----END RSA PRIVATE KEY-----\nb",
            f"a\n{REDACTED}\nb",
        ),
        ("-----BEGIN PRIVATE KEY-----\ncut off", REDACTED),
        (
            "before\n12:00 out| MIIEowIBAAKCAQEA0123456789\n12:00 out| abcdefghijklmnop==\n12:00 out| "
            "-----END RSA PRIVATE KEY-----\nafter",
            f"before\n{REDACTED}\nafter",
        ),
    ],
)
def test_secrets_in_text(text: str, expected: str) -> None:
    assert redact_text(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "step 60: loss=1.25 tokens=1000000 tokens_per_s=31337",
        "token: the smallest unit",
        "session: starting",
        "max_tokens=4096 token=3 pad_token='<pad>'",
        'File "/home/me/train.py", line 41, in log_metric',
        "tcp://10.0.0.1:29500 https://example.org/a@b",
        "user@host:/path http://localhost:8080/x?y=z",
        "RuntimeError: [rank0] NCCL timeout: sk-short hf_dataset",
        "TOKENIZERS_PARALLELISM=false NCCL_DEBUG=INFO",
        "-----BEGIN CERTIFICATE-----",
        "auth: true",
    ],
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert redact_text(text) == text


def test_environment_is_sorted_and_redacted_by_name() -> None:
    env = {"WANDB_API_KEY": "0123", "A": "1", "EMPTY_TOKEN": "", "PROXY": "http://u:p@proxy:1"}
    assert list(redact_env(env).items()) == [
        ("A", "1"),
        ("EMPTY_TOKEN", ""),
        ("PROXY", f"http://u:{REDACTED}@proxy:1"),
        ("WANDB_API_KEY", REDACTED),
    ]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["t.py", "--token", "x", "--lr", "1"], ["t.py", "--token", REDACTED, "--lr", "1"]),
        (["t.py", "--api_key=x y"], ["t.py", f"--api_key={REDACTED}"]),
        (["t.py", "HF_TOKEN=x"], ["t.py", f"HF_TOKEN={REDACTED}"]),
        (["t.py", "--password", "--verbose"], ["t.py", "--password", "--verbose"]),
        (["t.py", "--max-tokens", "5"], ["t.py", "--max-tokens", "5"]),
        (["t.py", "s3://u:p@h/x"], ["t.py", f"s3://u:{REDACTED}@h/x"]),
    ],
)
def test_command_lines(argv: list[str], expected: list[str]) -> None:
    assert redact_argv(argv) == expected


@pytest.mark.parametrize("unit", ["a", "a-", "a.b://", "eyJa", "token=", "-----BEGIN PRIVATE KEY-----", "=:", "--a "])
def test_no_text_takes_long(unit: str) -> None:
    text = (unit * 65536)[:65536]
    begin = time.process_time()
    redact_text(text)
    assert time.process_time() - begin < 2.0


# --- the very secrets of one job --------------------------------------------------------------------------------------


def test_the_secrets_of_a_job() -> None:
    environment = {
        "WANDB_API_KEY": "0123456789abcdef",
        "SSH_PRIVATE_KEY": "-----BEGIN KEY-----\nMIIEowIBAAKCAQEA\n",
        "DATABASE_URL": "postgres://trainer:horse-battery-staple@db/runs",
        "HOME": "/home/trainer1",
        "PLAIN": "nothing-special-at-all",
    }
    argv = [
        "python",
        "t.py",
        "--token",
        "tok-12345",
        "--password=pass-67890",
        "API_KEY=key-24680",
        "mongodb://u:mongo-13579@h",
    ]
    assert secret_values(environment, argv) == (
        "-----BEGIN KEY-----",
        "0123456789abcdef",
        "MIIEowIBAAKCAQEA",
        "horse-battery-staple",
        "key-24680",
        "mongo-13579",
        "pass-67890",
        "tok-12345",
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SHORT_TOKEN", "abc1234"),  # would be replaced wherever these letters stand
        ("DB_PASSWORD", "changeme"),
        ("USE_AUTH", "disabled"),
        ("JOB_SESSION", "20260101"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/secrets/gcp-0123456789.json"),
        ("NETRC", "~/.netrc-0123456789"),
        ("STORAGE_KEY", "project-0123"),  # part of the working directory
        ("EMPTY_TOKEN", ""),
    ],
)
def test_words_that_stand_everywhere_are_not_replaced(name: str, value: str) -> None:
    assert secret_values({name: value}, [], ["/data/project-0123/run"]) == ()


def test_they_are_replaced_wherever_they_stand() -> None:
    redactor = Redactor(("horse-battery", 'quo"ted/<value>1'))
    assert redactor.text("with horse-battery, not seahorse-battery or horse-battery1") == (
        f"with {REDACTED}, not seahorse-battery or horse-battery1"
    )
    for form in ('quo"ted/<value>1', json.dumps('quo"ted/<value>1')[1:-1], "quo%22ted%2F%3Cvalue%3E1"):
        assert redactor.text(f"x={form};") == f"x={REDACTED};"
    assert redactor.markup("<td>quo&quot;ted/&lt;value&gt;1</td>") == f"<td>{REDACTED}</td>"
    assert redactor.tree({"horse-battery": [1, None, ("horse-battery",)]}) == {"horse-battery": [1, None, [REDACTED]]}
    assert redactor.binary(b"\x80horse-battery.") == b"\x80*************."
    assert "horse" not in repr(redactor)


@pytest.mark.parametrize("text", ["a password=hunter2 b", "nothing", "https://h/?token=abc"])
def test_without_any_the_rest_still_holds(text: str) -> None:
    assert Redactor().text(text) == redact_text(text)
    assert Redactor().text(Redactor().text(text)) == redact_text(text)


@pytest.mark.parametrize("secret", SECRETS)
def test_redacting_twice_changes_nothing(secret: str) -> None:
    once = redact_text(f'{{"k": "{secret}"}} password: {secret} https://u:{secret}@h --token {secret}')
    assert secret not in once
    assert redact_text(once) == once
