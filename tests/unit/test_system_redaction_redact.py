"""Text that is recognized as a secret, and text that must stay readable."""

from __future__ import annotations

import base64
import html
import json
import pickle
import time
from urllib.parse import quote

import pytest

from safelaunch.system.redaction.job_secrets import left_out, secret_values
from safelaunch.system.redaction.redact import NOT_SHOWN, REDACTED, redact_argv, redact_env, redact_text, shown_env
from safelaunch.system.redaction.redactor import Redactor
from safelaunch.system.redaction.shapes import is_secret_name
from tests.support import leaks

SECRET_NAMES = [
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "GITHUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY",
    "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "OPENAI_API_KEY", "NEPTUNE_API_TOKEN", "COMET_API_KEY", "DB_PASSWORD",
    "PGPASSWORD", "MYSQL_PWD", "SENTRY_DSN", "AZURE_STORAGE_CONNECTION_STRING", "AZURE_CLIENT_SECRET",
    "GOOGLE_APPLICATION_CREDENTIALS", "SSH_PRIVATE_KEY", "BASIC_AUTH", "COOKIE", "SLACK_WEBHOOK_URL", "JWT",
    "dbPassword", "apiKey", "--api-key", "--hf-token", "NGC_KEY", "KUBE_TOKEN", "passwd", "GH_PAT", "SAS_SIG",
    "PASSWORD_SALT", "USER_SALT", "DOOR_PIN_CODE", "PIN", "MYPASSPHRASE", "signing_key", "my_key", "HFTOKEN",
    "_token", "HF_TOK", "STRIPE_SK", "OAUTH", "GOOGLE_OAUTH", "OAUTH2_CLIENT", "DD_API", "Pwd", "DBPASS", "ROOTPASS",
    "BINDPW", "ACCESS_CODE", "RECOVERY_CODES", "OPENAIKEY", "PRIVKEY", "SEED_PHRASE", "PIN2", "PASSWORD1", "PASS1",
    "SECRET2", "TOKEN2", "pw1", "apiKey2", "API_TOKENS", "HF_TOKENS", "GITHUB_TOKENS", "ACCESS_TOKENS",
    "SLACK_BOT_TOKENS", "TOKENS", "WIFI_PSK", "PSK", "SLACK_HOOK", "HOOK_URL", "SAS_URL",
]  # fmt: skip

PLAIN_NAMES = [
    "TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT", "RANK", "PWD",
    "OLDPWD", "PATH", "HOME", "MAX_TOKENS", "--max-tokens", "tokens_per_batch", "pad_token_id", "eos_token",
    "SSH_AUTH_SOCK", "XDG_SESSION_ID", "XDG_SESSION_TYPE", "DBUS_SESSION_BUS_ADDRESS", "DESKTOP_SESSION",
    "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "author", "keyboard", "monkey", "PYTHONPATH", "sort_key",
    "compass", "bypass", "pin_memory", "spin", "pattern", "next_token", "ms_per_token", "primary_key",
    "state_dict_keys", "KeyError", "design", "tok_per_s", "api_version", "risk", "task", "FORWARD_PASSES", "BYPASS",
    "COMPASS", "ERROR_CODE", "MONKEY", "SPIN", "PINNED", "num_tokens", "max_tokens", "tokens_per_second",
    "total_tokens", "prompt_tokens", "n_tokens", "special_tokens", "new_tokens", "forward_hook", "comm_hook", "hook",
    "image_tokens", "NEXT_TOKEN2", "secret_santa",
]  # fmt: skip


@pytest.mark.parametrize(("names", "secret"), [(SECRET_NAMES, True), (PLAIN_NAMES, False)])
def test_secret_name_is_recognized(names: list[str], secret: bool) -> None:
    assert [name for name in names if is_secret_name(name) != secret] == []


# Assembled from pieces, so that no scanner takes this file for a leak.
SECRETS = [
    *leaks.SHAPES.values(),
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
def test_secret_is_recognized_by_shape(secret: str) -> None:
    assert redact_text(f"loading with {secret} now") == f"loading with {REDACTED} now"
    assert redact_env({"NOTHING_SPECIAL": secret}) == {"NOTHING_SPECIAL": REDACTED}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("postgres://me:hunter2@db:5432/x", f"postgres://me:{REDACTED}@db:5432/x"),
        ("https://:pw@host/", f"https://:{REDACTED}@host/"),
        ("git clone https://0123456789abcdef0123@host/r", f"git clone https://{REDACTED}@host/r"),
        ("Authorization: Bearer abc.def", f"Authorization: Bearer {REDACTED}"),
        ("{'Authorization': 'Bearer abcdef'}", f"{{'Authorization': {REDACTED}}}"),
        ("password=hunter2 user=me", f"password={REDACTED} user=me"),
        ("password: hunter2", f"password: {REDACTED}"),
        ("password.yaml: 31337", f"password.yaml: {REDACTED}"),
        ("db.password:31337:", f"db.password:{REDACTED}"),
        ("password.json:313370", f"password.json:{REDACTED}"),
        ('{"api_key": "s3cr3t", "lr": 0.1}', f'{{"api_key": {REDACTED}, "lr": 0.1}}'),
        ("run --api-key=abc --lr 0.1", f"run --api-key={REDACTED} --lr 0.1"),
        ("run --token abc --lr 0.1", f"run --token {REDACTED} --lr 0.1"),
        ("run --token \\\n  abc --lr 0.1", f"run --token \\\n  {REDACTED} --lr 0.1"),
        ("run\n--token\nabc\n--lr", f"run\n--token\n{REDACTED}\n--lr"),
        ("run --token\naB3dE5gH7j 1", f"run --token\n{REDACTED} 1"),
        ("https://h/p?sig=1&token=abc", f"https://h/p?sig=1&token={REDACTED}"),
        ("https://h/c?sv=1&sig=aB3%2FxY7zQ9mN1kL5%3D&se=2", f"https://h/c?sv=1&sig={REDACTED}&se=2"),
        ("curl -u me:hunter2 https://h", f"curl -u me:{REDACTED} https://h"),
        ("curl --user=me:hunter2 https://h", f"curl --user=me:{REDACTED} https://h"),
        ("['curl', '-u', 'me:hunter2']", f"['curl', '-u', 'me:{REDACTED}']"),
        ("['t.py', '--token', 'abc']", f"['t.py', '--token', {REDACTED}]"),
        ("pw=hunter2", f"pw={REDACTED}"),
        ("tokens=tokA-11xx9,tokB-22 lr=1", f"tokens={REDACTED} lr=1"),
        ("f(api_keys=key-a1b2,batch=3)", f"f(api_keys={REDACTED},batch=3)"),
        ("api_tokens=['a1b2c3', 'd4e5f6'] x", f"api_tokens={REDACTED} x"),
        ("auth=('me', 'hunter2') x", f"auth={REDACTED} x"),
        ("Server=db;Uid=me;Pwd=hunter2", f"Server=db;Uid=me;Pwd={REDACTED}"),
        ("password=1234", f"password={REDACTED}"),
        ("PIN_CODE: 4711", f"PIN_CODE: {REDACTED}"),
        ("[('HF_TOKEN', 'abc'), ('LR', '0.1')]", f"[('HF_TOKEN', {REDACTED}), ('LR', '0.1')]"),
        ("os.environ['DB_PASSWORD'] = 'abc'", f"os.environ['DB_PASSWORD'] = {REDACTED}"),
        ("password='it\\'s mine' x", f"password={REDACTED} x"),
        ("salt=aB3dE5gH", f"salt={REDACTED}"),
        ("failed\\nHF_TOKEN=abc\\nnext", f"failed\\nHF_TOKEN={REDACTED}\\nnext"),
        ('{\\"password\\": \\"abc\\"}', f'{{\\"password\\": {REDACTED}}}'),
        ("password%3Dabc%26x", f"password%3D{REDACTED}"),
        ("Cookie: a=b; sid=c\nnext", f"Cookie: {REDACTED}\nnext"),
        ("dXNlcjpwYXNzd29yZD1odW50ZXIy", REDACTED),  # user:password=hunter2
        ("Cookie: a=b", f"Cookie: {REDACTED}"),
        (
            "a\n-----BEGIN RSA PRIVATE KEY-----\nMIIE\nxyz\n-----END RSA PRIVATE KEY-----\nb",
            f"a\n{REDACTED}\nb",
        ),
        ("-----BEGIN PRIVATE KEY-----\nMIIEowIBAAKCAQEA0123456789\nMIIcut", REDACTED),
        ("expected -----BEGIN PRIVATE KEY-----\nbut the file is empty", f"expected {REDACTED}\nbut the file is empty"),
        ("a -----BEGIN EC PRIVATE KEY-----\\nMIIE\\n-----END EC PRIVATE KEY-----\\n b", f"a {REDACTED}\\n b"),
        (
            "before\n12:00 out| MIIEowIBAAKCAQEA0123456789\n12:00 out| abcdefghijklmnop==\n12:00 out| "
            "-----END RSA PRIVATE KEY-----\nafter",
            f"before\n{REDACTED}\nafter",
        ),
        ("mysql -u root -phunter2 db", f"mysql -u root -p{REDACTED} db"),
        ("['mysqldump', '-phunter2', 'db']", f"['mysqldump', '-p{REDACTED}', 'db']"),
        ("docker login -u me -p hunter2 r && t.py -p 8", f"docker login -u me -p {REDACTED} r && t.py -p 8"),
        ("az login -u me -p hunter2", f"az login -u me -p {REDACTED}"),
        ("redis-cli -a hunter2 ping; ls -a x", f"redis-cli -a {REDACTED} ping; ls -a x"),
        ("sshpass -p hunter2 ssh h", f"sshpass -p {REDACTED} ssh h"),
        ("torchrun -p 8; ssh -p 22 mysql", "torchrun -p 8; ssh -p 22 mysql"),
    ],
)
def test_secrets_in_text_are_redacted(text: str, expected: str) -> None:
    assert redact_text(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "step 60: loss=1.25 tokens=1000000 tokens_per_s=31337 tok=1234567 tok/s: 31337.5",
        "docker run -p 8080:80 image; python train.py -p 8 -a x; ssh -p 22 host",
        "token: the smallest unit",
        "/usr/lib/python3.11/secrets.py:37: DeprecationWarning: gone",
        "./password.yaml:12:5: not valid YAML (see auth_token.py:123)",
        "session: starting",
        "max_tokens=4096 token=3 pad_token='<pad>'",
        'File "/home/me/train.py", line 41, in log_metric',
        "tcp://10.0.0.1:29500 https://example.org/a@b",
        "user@host:/path http://localhost:8080/x?y=z",
        "RuntimeError: [rank0] NCCL timeout: sk-short hf_dataset",
        "TOKENIZERS_PARALLELISM=false NCCL_DEBUG=INFO",
        "-----BEGIN CERTIFICATE-----",
        "auth: true",
        "sort_key=loss1234 state_keys: 12 missing_key=layer1.weight2",
        "key=layer_12 sig=SIGUSR1 sig=15 pin_memory=True pin=3",
        "token = tokenizer.decode(ids) auth = get_auth(1)",
        "docker run -u 1000:1000 image; git -c core.pager=cat log -p HEAD",
        "/data/3fa85f64b7d6c1e2a9/run-5f2d8c1/checkpoints/step_1234.pt",
        "torch.Size([1234, 512]) shape=(1234, 5) loss 1.234e-05 at 12:34:56",
        "rank 3 at train.py:1234, line 1234 in step, pid 1234, node-1234.cluster",
        "ENCODER_LAYER_NORMALIZATION_FORWARD_BACKWARD_0123456789abcdef0123",
        "s3://bucket/path?versionId=3 https://host/a?code=12 user@host:22",
        "Password: \n",
        "b'\\x80\\x02}q\\x00' &amp; %20 \\n\\t",
        "signature: (Tensor x, int y)",
        "cookie: 3 of 4",
        "session=run-2026-11-22",
        "num_tokens=123 max_tokens=4096 tokens: 123 tokens_per_second: 3.5 total_tokens=8192 n_tokens=12",
        "tokens=[1, 2, 3] tokens: [15339, 1917] api_tokens: 5",
        "tokens: ['hello', 'world'] tokens=hello",
        "token1: the smallest unit, pass1: done, pass2=0.5",
        "credentials: file",
        "run.py --secret-santa bob",
        "started with --use-auth\n2026-11-26 01:09:56 ready",
        "no --api-key\nTraceback (most recent call last):",
        "serve --auth-required model.yaml",
        "cache key='abc123def4' hit",
        "DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cpu//0/0",
    ],
)
def test_ordinary_text_is_not_redacted(text: str) -> None:
    assert redact_text(text) == text


def test_environment_is_sorted_and_redacted_by_name() -> None:
    env = {"WANDB_API_KEY": "0123", "A": "1", "EMPTY_TOKEN": "", "PROXY": "http://u:p@proxy:1"}
    assert list(redact_env(env).items()) == [
        ("A", "1"),
        ("EMPTY_TOKEN", ""),
        ("PROXY", f"http://u:{REDACTED}@proxy:1"),
        ("WANDB_API_KEY", REDACTED),
    ]


def test_shown_environment_hides_unknown_variables() -> None:
    env = {
        "NCCL_DEBUG": "INFO",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "SLURM_JOB_ID": "77",
        "WORLD_SIZE": "2",
        "PATH": "/bin",
        "TORCH_LOGS": "https://u:p@h",
        "EMPTY": "",
    }
    secret = {"GH_PAT": "x", "SAS_SIG": "x", "A_SALT": "x", "A_PIN_CODE": "1", "MYPASSPHRASE": "x", "my_key": "x"}
    secret["SLURM_JWT"] = "x"
    unknown = {"SOMETHING": "x", "MY_URL": "x", "nccl": "x", "https_proxy": "x"}
    shown = shown_env({**env, **secret, **unknown})
    assert {name: shown[name] for name in env} == {**env, "TORCH_LOGS": f"https://u:{REDACTED}@h"}
    assert {shown[name] for name in secret} == {REDACTED}
    assert {shown[name] for name in unknown} == {NOT_SHOWN}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["t.py", "--token", "x", "--lr", "1"], ["t.py", "--token", REDACTED, "--lr", "1"]),
        (["t.py", "--api_key=x y"], ["t.py", f"--api_key={REDACTED}"]),
        (["t.py", "HF_TOKEN=x"], ["t.py", f"HF_TOKEN={REDACTED}"]),
        (["t.py", "--password", "--verbose"], ["t.py", "--password", "--verbose"]),
        (["t.py", "--max-tokens", "5"], ["t.py", "--max-tokens", "5"]),
        (["t.py", "s3://u:p@h/x"], ["t.py", f"s3://u:{REDACTED}@h/x"]),
        (["curl", "-u", "me:pw"], ["curl", "-u", f"me:{REDACTED}"]),
        (["docker", "run", "-p", "8080:80", "i"], ["docker", "run", "-p", "8080:80", "i"]),
        (["python", "t.py", "-p", "8", "-a", "b"], ["python", "t.py", "-p", "8", "-a", "b"]),
        (["t.py", "--api", "rest", "--tok", "bpe"], ["t.py", "--api", "rest", "--tok", "bpe"]),
        (["t.py", "--tok", "aB3dE5gH7j"], ["t.py", "--tok", REDACTED]),
        (["t.py", "--sort-key", "loss", "--key", "layer_1"], ["t.py", "--sort-key", "loss", "--key", "layer_1"]),
        (["t.py", "--key", "aB3dE5gH7j"], ["t.py", "--key", REDACTED]),
        (["/usr/bin/mysql", "-ppw", "db"], ["/usr/bin/mysql", f"-p{REDACTED}", "db"]),
        (["mysql", "-p", "-u", "root"], ["mysql", "-p", "-u", "root"]),
        (["docker", "login", "-u", "me", "-p", "a pw"], ["docker", "login", "-u", "me", "-p", REDACTED]),
        (["sudo", "redis-cli", "-h", "db", "-a", "pw"], ["sudo", "redis-cli", "-h", "db", "-a", REDACTED]),
        (["t.py", "--db", "mysql", "-p", "8"], ["t.py", "--db", "mysql", "-p", "8"]),
        (["sshpass", "-p", "pw", "ssh"], ["sshpass", "-p", REDACTED, "ssh"]),
        ([], []),
    ],
)
def test_secrets_in_command_line_are_redacted(argv: list[str], expected: list[str]) -> None:
    assert redact_argv(argv) == expected


# --- secrets of a job -------------------------------------------------------------------------------------------------


def test_secret_values_are_found_in_environment_and_arguments() -> None:
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
        "--header",
        "Authorization: Bearer bearer-11223",
        "https://h/?sig=aB3%2FxY7zQ9mN1",
    ]
    assert secret_values(environment, argv) == (
        "0123456789abcdef",
        "MIIEowIBAAKCAQEA",
        "aB3%2FxY7zQ9mN1",
        "aB3/xY7zQ9mN1",
        "bearer-11223",
        "horse-battery-staple",
        "key-24680",
        "mongo-13579",
        "pass-67890",
        "tok-12345",
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("USE_AUTH", "disabled"),
        ("TOKEN_COUNT", "20260101"),
        ("DB_PASSWORD", "abc"),  # would be replaced in every word with these letters
        ("DB_USER_PASSWORD", "run-7"),  # the run's name
        ("GOOGLE_APPLICATION_CREDENTIALS", "/secrets/gcp-0123456789.json"),
        ("NETRC", "~/.netrc-0123456789"),
        ("STORAGE_KEY", "project-0123"),  # part of the working directory
        ("EMPTY_TOKEN", ""),
    ],
)
def test_common_words_are_no_secret_values(name: str, value: str) -> None:
    assert secret_values({name: value}, [], ["/data/project-0123/run", "run-7"]) == ()


def test_redactor_replaces_secret_in_any_form() -> None:
    redactor = Redactor(("horse-battery", 'quo"ted/<value>1'))
    assert redactor.text("with horse-battery, xhorse-batteryx") == f"with {REDACTED}, x{REDACTED}x"
    for form in ('quo"ted/<value>1', json.dumps('quo"ted/<value>1')[1:-1], "quo%22ted%2F%3Cvalue%3E1"):
        assert redactor.text(f"x={form};") == f"x={REDACTED};"
    assert redactor.text("cut off at horse-bat...") == f"cut off at {REDACTED}..."
    assert redactor.text("se-battery was cut off") == f"{REDACTED} was cut off"
    assert redactor.markup("<td>quo&quot;ted/&lt;value&gt;1</td>") == f"<td>{REDACTED}</td>"
    assert redactor.tree({"horse-battery": [1, None, ("horse-battery",)]}) == {REDACTED: [1, None, (REDACTED,)]}
    assert redactor.data(b"\x80horse-battery.") == b"\x80*************."
    assert "horse" not in repr(redactor)


@pytest.mark.parametrize("text", ["a password=hunter2 b", "nothing", "https://h/?token=abc"])
def test_redactor_without_secrets_still_redacts_patterns(text: str) -> None:
    assert Redactor().text(text) == redact_text(text)
    assert Redactor().text(Redactor().text(text)) == redact_text(text)


@pytest.mark.parametrize("secret", SECRETS)
def test_redacting_twice_changes_nothing(secret: str) -> None:
    once = redact_text(f'{{"k": "{secret}"}} password: {secret} https://u:{secret}@h --token {secret}')
    assert secret not in once
    assert redact_text(once) == once


@pytest.mark.parametrize("secret", [r"d&-VZ\fD7x", r"#\F9$}<\"OIJ7", "/e4[o)T7&#47;x", "100%41&amp;\\n-x"])
def test_secret_with_escapes_or_slashes_is_redacted(secret: str) -> None:
    redactor = Redactor(secret_values({"DB_PASSWORD": secret}, []))
    for form in (secret, html.escape(secret), quote(secret, safe=""), json.dumps(secret)[1:-1], repr(secret)[1:-1]):
        assert redactor.text(f"it is {form} now") == f"it is {REDACTED} now", form


def test_secret_inside_base64_is_redacted() -> None:
    redactor = Redactor(("horse-battery",))
    for before in (b"user:", b"\xff\x00"):
        word = base64.b64encode(before + b"horse-battery\xfe").decode()
        assert redactor.text(f"auth {word} sent") == f"auth {REDACTED} sent"
    glued = f"x{base64.b64encode(b'horse-battery').decode().rstrip('=')}x"
    assert "aG9yc2" not in redactor.text(f"auth {glued} sent")
    name = base64.b64encode(b"\xff\x00password=hunter2").decode()
    assert redactor.text(f"data {name} sent") == f"data {name} sent"


# --- short secrets ----------------------------------------------------------------------------------------------------

SHORT = Redactor(("1234", "hunter2", "train", "20260101"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("with 1234", f"with {REDACTED}"),
        ("'1234'", f"'{REDACTED}'"),
        ("1234", REDACTED),
        ("pin is 1234, door 20260101", f"pin is {REDACTED}, door {REDACTED}"),
        ("me:hunter2@db", f"me:{REDACTED}@db"),
        ("hunter2.", f"{REDACTED}."),
        ("the password is train", f"the password is {REDACTED}"),
        ("failed\\nhunter2\\n", f"failed\\n{REDACTED}\\n"),
        ("bWU6aHVudGVyMg==", REDACTED),
        ("MTIzNA==", REDACTED),
        ("68756e74657232", REDACTED),
        ("\x1b[31mhun\x1b[0mter2", f"\x1b[31m{REDACTED}"),
    ],
)
def test_short_secret_is_redacted_as_whole_word_in_job_text(text: str, expected: str) -> None:
    assert SHORT.job_text(text) == expected
    assert SHORT.text(text) == text, "what we put together ourselves is full of numbers and words"


@pytest.mark.parametrize(
    "text",
    [
        'File "/x/train.py", line 1234, in train_step',
        "step 1234: loss 0.1234, 1234 ms, 1234 tokens, 12345",
        "step=1234 rank=1234 pid 1234 #1234 train.py:1234 node1:1234",
        "torch.Size([1234, 1234]) shape (8, 1234, 512) f[1234]",
        "/data/train/1234/ckpt-1234.pt train.py retrain my-train-run hunter21",
        "1234/5000 [00:12<00:30] 1234.5 2026-01-01 v1234",
        "localhost:1234 10.0.0.1:1234 0x1234 git 1234abcd",
    ],
)
def test_short_secret_inside_other_words_stays(text: str) -> None:
    assert SHORT.job_text(text) == text


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 4])
def test_redacted_dump_is_still_readable(protocol: int) -> None:
    dump = leaks.flight_dump("group of horse-battery")
    clean = Redactor(("horse-battery",)).data(pickle.dumps(dump, protocol=protocol))
    assert pickle.loads(clean) == leaks.flight_dump(f"group of {REDACTED}")
    whole = pickle.dumps(leaks.flight_dump("group of mine"), protocol=protocol)
    assert Redactor(("horse-battery",)).data(whole) is whole
    assert b"horse" not in Redactor(("horse-battery",)).data(whole + b"horse-battery"), "behind its end"
    json_dump = json.dumps(dump).encode()
    expected = json.loads(json.dumps(leaks.flight_dump(f"group of {REDACTED}")))
    assert json.loads(Redactor(("horse-battery",)).data(json_dump)) == expected


def test_redacted_dump_keeps_numbers() -> None:
    """In torch's JSON, a sequence number is text."""
    status = {"last_enqueued_collective": "1234", "last_completed_collective": "1233"}
    dump = {
        "pg_status": {"1234": status},
        "pg_config": {"1234": {"name": "1234", "desc": "1234", "ranks": "[0, 1234]"}},
    }
    cleaned = json.loads(SHORT.data(json.dumps({**dump, "entries": []}).encode()))
    assert cleaned["pg_status"] == dump["pg_status"]
    assert cleaned["pg_config"] == {"1234": {"name": "1234", "desc": REDACTED, "ranks": "[0, 1234]"}}


def test_redacted_damaged_dump_keeps_length() -> None:
    data = pickle.dumps(leaks.flight_dump("group of horse-battery"), protocol=2)[:-5]
    clean = Redactor(("horse-battery",)).data(data)
    assert len(clean) == len(data) and b"horse" not in clean
    bomb = b"\x80\x02" + b"(" * 100_000 + b"horse-battery"
    assert b"horse" not in Redactor(("horse-battery",)).data(bomb)


# --- time -------------------------------------------------------------------------------------------------------------

# Beginnings of everything that is searched, so that patterns begin often and rarely end.
UNITS = [
    "a", "a-", "a.", "a ", "aa  ", " ", "\t", "\n", "'", '"', "\\", '\\"', "=:", "%41", "&amp;", "\\u0041", "\x1b[",
    "\x1b]",
    "a://", "a.b://", "a://b:", "a:a@", "token=", "token='", 'token="', "token: ", "'token', '", "?sig=", "key=ab1",
    "authorization: ", "bearer ", "cookie:", "--a ", "--token 'a", " -u a:", "curl -u ",
    "password ", "-----BEGIN ", "-----BEGIN PRIVATE KEY-----",
    "-----END PRIVATE KEY-----", "ABCDEFGHIJKLMNOP\n", "ABCDEFGHIJKLMNOP ", "QUFB ", "QUFBQUFBQUFBQUFBQUFB", "3132",
    "1234 ",
    "tokens=abcd", ",abcd", "tokens=['a',", "'a',", "token=['", "horse-batt ", "train ", "password is ",
    "hunter2 ", "horse-", "horse-battery", "horse-b\n",
    *(shape[:12] for shape in SECRETS), *(f"{shape[:7]} " for shape in SECRETS),
    *(f"-{shape[:7]}" for shape in SECRETS),
]  # fmt: skip
ALL = Redactor(("horse-battery", "aB3xY7zQ9mN1", "1234", "hunter2", "train"))


def seconds(text: str) -> float:
    begin = time.process_time()
    ALL.job_text(text)
    return time.process_time() - begin


def is_proportional(unit: str, size: int) -> bool:
    """Returns whether twice the text takes at most about twice the time; quadratic patterns take four times as long."""
    text = (unit * (size // len(unit) + 1))[:size]
    return any(seconds(text * 2) < 3.2 * max(seconds(text), 1e-3) for _ in range(6))


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS)
def test_redaction_time_is_linear_in_length(unit: str) -> None:
    assert is_proportional(unit, 1 << 15)


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["a", "eyJ-", "token=", "ABCDEFGHIJKLMNOP ", "-----BEGIN PRIVATE KEY-----", "{all}"])
def test_redaction_time_is_linear_for_long_lines(unit: str) -> None:
    assert is_proportional("".join(UNITS) if unit == "{all}" else unit, 1 << 19)


@pytest.mark.parametrize("words", (["--db", "u5:pwInUrl99@hosty"], ["--dest=root:pwInUrl99@10.0.0.5:/data"]))
def test_password_next_to_user_in_argument_is_redacted(words: list[str]) -> None:
    redactor = Redactor(secret_values({}, words))
    assert "pwInUrl99" not in redactor.job_text("connecting with pwInUrl99")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("db-hunter2, hunter2/x, x_hunter2", "db-[redacted], [redacted]/x, x_[redacted]"),
        ("hunter22 is another", "hunter22 is another"),
        ("u:1234@h", "u:[redacted]@h"),
        ("train.py:1234: in train-main", "train.py:1234: in train-main"),
    ],
)
def test_short_secret_next_to_punctuation_is_redacted(text: str, expected: str) -> None:
    redactor = Redactor(secret_values({"A_PASSWORD": "hunter2", "A_PIN": "1234", "B_PASSWORD": "main"}, []))
    assert redactor.job_text(text) == expected


@pytest.mark.parametrize("text", ["Cookie: sid=abc123; b=c", "session=ab12cd34ef56", "signature: 9f86d081884c7d659a2f"])
def test_values_of_cookie_session_and_signature_are_redacted(text: str) -> None:
    assert redact_text(text).endswith("[redacted]")


# --- compound values, paths and truncated secrets ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("HF_TOKENS", "tokA-11xx9,tokB-22", ["tokA-11xx9", "tokB-22"]),
        ("SECRETS", "alpha-77;beta-88x", ["alpha-77", "beta-88x"]),
        ("AUTH_TOKEN", "secA-11aa secB-22bb secC-33cc", ["secA-11aa", "secB-22bb", "secC-33cc"]),
        ("API_KEYS", "key-a1b2c3;key-d4e5f6", ["key-a1b2c3", "key-d4e5f6"]),
        ("JSON_TOKENS", '["tok-aa11", "tok-bb22"]', ["tok-aa11", "tok-bb22"]),
        ("JSON_TOKENS", '{"one": "tok-aa11-x", "two": ["tok-bb22-y"]}', ["tok-aa11-x", "tok-bb22-y"]),
        ("ACCESS_TOKENS", "['tok-aa11', 'tok-bb22']", ["tok-aa11", "tok-bb22"]),
        ("API_TOKENS", "tok-aa11\ntok-bb22\n", ["tok-aa11", "tok-bb22"]),
        ("API_TOKENS", "me:tok-aa11,you:tok-bb22", ["tok-aa11", "tok-bb22"]),
        ("PASSWORDS", "opensesame,swordfish", ["opensesame", "swordfish"]),
        ("X", "Password=cs-pass-99;User=x", ["cs-pass-99"]),
        ("CONN", "Server=x;Password=cs-pass-99;", ["cs-pass-99"]),
        ("URL", "https://h/x?api_key=qs-key-55aa&x=1", ["qs-key-55aa"]),
        ("B64_SECRET", "bXktcGxhaW4tc2VjcmV0LTc3", ["my-plain-secret-77"]),
        ("DOCKER_AUTH", "bWU6c3VyZmVyLTc3eA==", ["surfer-77x"]),
    ],
)
def test_each_secret_in_compound_value_is_redacted(name: str, value: str, parts: list[str]) -> None:
    for words in ({name: value}, {}), ({}, [f"--{name}={value}"]):
        redactor = Redactor(secret_values(*words))
        for part in parts:
            assert redactor.job_text(f"it is {part} now") == f"it is {REDACTED} now"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("MYPASSPHRASE", "correct horse battery staple9", "a correct answer of the horse on battery"),
        ("PRIVATE_PACKAGES", "torch-2.4.1,numpy==1.26", "torch-2.4.1 and numpy==1.26"),
        ("AUTH_SETTINGS", "mode=x,12,true,/etc/auth", "12 true /etc/auth"),
        ("DICT_KEYS", "inputs,labels", "inputs labels"),
        ("PASSWORDS", "opensesame,train", "train: step 5"),
    ],
)
def test_words_in_compound_value_stay(name: str, value: str, text: str) -> None:
    assert Redactor(secret_values({name: value}, [])).job_text(text) == text


def test_secret_contained_in_path_is_redacted() -> None:
    places = ["/home/me/runs/mytoken-88aa1", "exp-token-99bb2"]
    environment = {"MY_TOKEN": "token-88aa1", "A_TOKEN": "exp-token-99bb2", "B_TOKEN": "mytoken-88aa1", "C_TOKEN": "me"}
    assert secret_values(environment, ["--api-key", "runs"], places) == ("runs", "token-88aa1")
    assert left_out(environment, ["--api-key", "exp-token-99bb2"], places) == ("--api-key", "A_TOKEN", "B_TOKEN")
    assert secret_values({"RUNS": "/data/aB3/xY7zQ9mN1kL5pR2"}, [], ["/data/aB3/xY7zQ9mN1kL5pR2/here"]) == ()
    redactor = Redactor(secret_values(environment, [], places))
    assert redactor.job_text("at /home/me/runs/mytoken-88aa1/x") == f"at /home/me/runs/my{REDACTED}/x"


@pytest.mark.parametrize("password", ["root", "train", "loss", "error", "Train"])
def test_common_word_password_is_redacted_only_in_context(password: str) -> None:
    redactor = Redactor(secret_values({"DB_PASSWORD": password}, []))
    for text in (f"{password}: 0.5", f"[{password}] {password} is 3", f"user {password} did {password}"):
        assert redactor.job_text(text) == text
    for text in ("the password is {}", "token '{}'", "me:{}@db", "DB_PASSWORD={}", "--password {}"):
        assert password not in redactor.job_text(text.format(password)).replace("[redacted]", "")


@pytest.mark.parametrize(
    ("value", "text", "expected"),
    [
        ("0123456789abcdef0123456789abcdef01234567", "key 0123456789ab... ok", f"key {REDACTED}... ok"),
        ("0123456789abcdef0123456789abcdef01234567", "key 0123456789abcdef0123*** ok", f"key {REDACTED}*** ok"),
        ("0123456789abcdef0123456789abcdef01234567", "run 0123456789a is shorter", "run 0123456789a is shorter"),
        ("correct-horse-battery-staple", "password: correct-horse-b…, user: me", None),
        ("https://hooks.chat.example/services/T0/B0/x8Kd03mQ", "see https://hooks.chat.example for help", None),
        ("my-project-for-training-token", "cloning my-project-fo into /work", "cloning my-project-fo into /work"),
    ],
)
def test_truncated_secret_is_redacted(value: str, text: str, expected: str | None) -> None:
    redactor = Redactor((value,))
    shown = redactor.job_text(text)
    if expected is not None:
        assert shown == expected
    elif "://" in value:
        assert shown == text, "a host that anybody may name"
    else:
        assert value[:12] not in shown
    assert redactor.data(text.encode()).decode() == shown and redactor.text(shown) == shown
