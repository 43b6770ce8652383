"""Recognizes secrets by their shape (key prefixes of services, webhooks, private keys), or by their names.

The prefixes come from the services' documentation, as in gitleaks and detect-secrets.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Literal

Span = tuple[int, int]

# (text that each match contains, pattern). Searching the text costs a twentieth of the pattern's search. No match
# begins inside a word. A long run that might not match is tried only from its beginning.
_KINDS = (
    ("gh", r"gh[pousr]_[A-Za-z0-9]{20,}"),
    ("github_pat_", r"github_pat_[A-Za-z0-9_]{20,}"),
    ("gl", r"gl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|oas|soat|ffct)-[A-Za-z0-9_\-]{16,}"),
    ("hf_", r"hf_[A-Za-z0-9]{20,}"),
    ("api_org_", r"api_org_[A-Za-z0-9]{20,}"),
    ("r8_", r"r8_[A-Za-z0-9]{30,}"),
    ("gsk_", r"gsk_[A-Za-z0-9]{20,}"),
    ("xai-", r"xai-[A-Za-z0-9]{40,}"),
    ("pplx-", r"pplx-[A-Za-z0-9]{32,}"),
    ("nvapi-", r"nvapi-[A-Za-z0-9_\-]{32,}"),
    ("lsv2_", r"lsv2_(?:pt|sk)_[A-Za-z0-9_]{24,}"),
    ("wandb_v", r"wandb_v\d_[A-Za-z0-9_]{20,}"),
    ("pcsk_", r"pcsk_[A-Za-z0-9_]{20,}"),
    ("sk-", r"sk-[A-Za-z0-9_\-]{20,}"),
    ("sk_", r"[rsp]k_(?:live|test|prod)_[A-Za-z0-9]{16,}"),
    ("rk_", r"rk_(?:live|test|prod)_[A-Za-z0-9]{16,}"),
    ("whsec_", r"whsec_[A-Za-z0-9+/=]{24,}"),
    ("xox", r"xox[abeoprs]-[A-Za-z0-9\-]{10,}"),
    ("xapp-", r"xapp-[A-Za-z0-9\-]{10,}"),
    ("AKIA", r"AKIA[A-Z0-9]{16}(?![A-Za-z0-9])"),
    ("ASIA", r"ASIA[A-Z0-9]{16}(?![A-Za-z0-9])"),
    ("ABIA", r"ABIA[A-Z0-9]{16}(?![A-Za-z0-9])"),
    ("AIza", r"AIza[A-Za-z0-9_\-]{35}"),
    ("GOCSPX-", r"GOCSPX-[A-Za-z0-9_\-]{20,}"),
    ("ya29.", r"ya29\.[A-Za-z0-9_\-]{20,}"),
    ("pypi-", r"pypi-[A-Za-z0-9_\-]{32,}"),
    ("npm_", r"npm_[A-Za-z0-9]{36}"),
    ("rubygems_", r"rubygems_[a-f0-9]{48}"),
    ("dckr_", r"dckr_(?:pat|oat)_[A-Za-z0-9_\-]{20,}"),
    ("_v1_", r"do[opr]_v1_[a-f0-9]{64}"),
    ("dapi", r"dapi[a-f0-9]{32}(?:-\d)?"),
    ("dp.", r"dp\.(?:pt|st|ct|sa|scim|audit)\.[A-Za-z0-9]{20,}"),
    ("hv", r"hv[sbr]\.[A-Za-z0-9_\-]{20,}"),
    ("SG.", r"SG\.[A-Za-z0-9_\-]{16,64}\.[A-Za-z0-9_\-]{16,64}"),
    ("gl", r"gl(?:sa|c)_[A-Za-z0-9+/=_]{32,}"),
    ("NRAK-", r"NRAK-[A-Z0-9]{27}"),
    ("shp", r"shp(?:at|ca|pa|ss)_[a-fA-F0-9]{32}"),
    ("tskey-", r"tskey-[a-z]{2,12}-[A-Za-z0-9\-]{16,}"),
    ("pul-", r"pul-[a-f0-9]{40}"),
    ("PMAK-", r"PMAK-[a-f0-9]{24}-[a-f0-9]{34}"),
    ("lin_api_", r"lin_api_[A-Za-z0-9]{40}"),
    ("ntn_", r"ntn_[A-Za-z0-9]{40,}"),
    ("xkeysib-", r"xkeysib-[a-f0-9]{64}-[A-Za-z0-9]{16}"),
    ("ATATT3", r"ATATT3[A-Za-z0-9_\-=]{32,}"),
    ("pscale_", r"pscale_(?:tkn|pw|oauth)_[A-Za-z0-9_\-.]{32,}"),
    ("AGE-SECRET-KEY-1", r"AGE-SECRET-KEY-1[A-Z0-9]{50,}"),
    (":AA", r"\d{8,10}:AA[A-Za-z0-9_\-]{32,34}"),
    ("eyJhcGlfYWRkcmVzcyI6", r"eyJhcGlfYWRkcmVzcyI6[A-Za-z0-9+/=]{20,}"),
    ("eyJ", r"(?<![\-_])eyJ[A-Za-z0-9_\-]{8,2000}\.eyJ[A-Za-z0-9_\-]{8,}(?:\.[A-Za-z0-9_\-]*)?"),
    ("hooks.slack.com", r"https://hooks\.slack\.com/[A-Za-z0-9/_\-]+"),
    ("/api/webhooks/", r"https://[a-z.]{0,20}discord(?:app)?\.com/api/webhooks/[A-Za-z0-9/_\-]+"),
    ("/webhooks/", r"https://[a-z.]{0,20}discord(?:app)?\.com/api/v\d{1,2}/webhooks/[A-Za-z0-9/_\-]+"),
    (".office.com/webhook", r"https://[a-z0-9.\-]{1,100}\.office\.com/webhook[A-Za-z0-9@/_\-]+"),
    ("api.telegram.org/bot", r"https://api\.telegram\.org/bot[A-Za-z0-9:_\-]+"),
)
# Signatures in URLs, which grant access to any holder.
_SIGNED = re.compile(
    r"(?<=[?&;])(?P<head>(?:sig|signature|x-amz-(?:signature|credential|security-token)"
    r"|x-goog-(?:signature|credential)|awsaccesskeyid|googleaccessid|code)=)[^\s\"'&<>;,\\]{8,}",
    re.IGNORECASE,
)

_BEGIN = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_END = re.compile(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_LONGEST_KEY = 32_768  # characters, with the log's prefix of each line
_BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_KEY_LINE = 16  # minimum base64 characters at a line's end; the last line can be shorter
_AFTER_A_WORD = re.compile(r"(?:[^\s\"'])*")


def shapes_in(text: str) -> Iterator[Span]:
    for mark, pattern in _KINDS:
        if mark in text:
            yield from (match.span() for match in _compiled(pattern).finditer(text))
    if "=" in text:
        yield from ((match.end("head"), match.end()) for match in _SIGNED.finditer(text))
    if "PRIVATE KEY" in text:
        yield from _private_keys(text)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    # Compiling all patterns is slow, and most jobs have none of these secrets.
    return re.compile(rf"(?<![A-Za-z0-9]){pattern}")


def _private_keys(text: str) -> Iterator[Span]:
    """Yields private keys from BEGIN to END.

    If one marker is missing, yields the Base64 lines next to the other one.
    """
    ends = [match.span() for match in _END.finditer(text)]
    begun = [end for end, _ in ends]
    done = 0
    with_beginning: set[int] = set()
    for begin in _BEGIN.finditer(text):
        if begin.start() < done:
            continue
        following = bisect_left(begun, begin.end())
        whole = following < len(ends) and ends[following][1] - begin.start() <= _LONGEST_KEY
        done = ends[following][1] if whole else _last_key_line(text, begin.end())
        with_beginning.update({following} if whole else ())
        yield begin.start(), done
    for number, (start, stop) in enumerate(ends):
        if number not in with_beginning:
            yield _first_key_line(text, start), stop


def _last_key_line(text: str, begin: int) -> int:
    """Returns the end of the Base64 lines that follow ``begin``, including a line that was cut off."""
    tail = _AFTER_A_WORD.match(text, begin)
    end = tail.end() if tail else begin
    while end < len(text) and text[end] in "\r\n":
        line_end = text.find("\n", end + 1)
        line_end = len(text) if line_end < 0 else line_end
        line = text[end + 1 : line_end]
        own = _base64_at_end(line)
        cut_off = line_end == len(text) and own and (" " not in line or line[:-own].endswith("| "))
        if own < _KEY_LINE and not cut_off:
            break
        end = line_end
    return end


def _first_key_line(text: str, end: int) -> int:
    """Returns the start of the Base64 lines before the line that contains ``end``. Reads each line once."""
    begin = text.rfind("\n", 0, end) + 1
    while begin:
        line = text.rfind("\n", 0, begin - 1) + 1
        if _base64_at_end(text[line : begin - 1]) < _KEY_LINE:
            break
        begin = line
    return begin


def _base64_at_end(line: str) -> int:
    bare = line.rstrip().rstrip("=")
    return len(bare) - len(bare.rstrip(_BASE64))


# --- names ------------------------------------------------------------------------------------------------------------

# "password": any value, even a number. "secret": no number, truth value and the like. "maybe": a random-looking value.
SecretKind = Literal["password", "secret", "maybe", ""]

# Words of a name, which is split at _, -, ., spaces and changes of case.
_PASSWORDS = {
    "password", "passwords", "passwd", "passphrase", "passcode", "pincode", "pwd", "pw", "psw", "pword", "otp", "totp",
    "psk",
}  # fmt: skip
_SECRETS = {
    "token", "secret", "secrets", "pass", "passkey", "apikey", "authkey", "authtoken", "accesskey", "secretkey",
    "credential", "credentials", "creds", "auth", "authorization", "bearer", "cookie", "cookies", "session",
    "sessionid", "jwt", "private", "dsn", "signature", "netrc", "webhook", "webhooks", "mnemonic", "pepper", "ghpat",
    "oauth",
}  # fmt: skip
_ENDINGS = (
    ("password", "password"), ("passwd", "password"), ("passphrase", "password"), ("passcode", "password"),
    ("secret", "secret"), ("apikey", "secret"), ("authtoken", "secret"), ("token", "secret"),
)  # fmt: skip
# Word pairs, and words that count only at the end of the name.
_SECRET_PAIRS = re.compile(
    r"(?:api|access|secret|private|signing|encryption|account|storage|service|license|auth|master|deploy|ssh|shared"
    r"|sas|hmac|session|webhook|instrumentation|priv|openai|my|gpg)_?keys?(?:_|\Z)|connection_?string|conn_?str"
    r"|(?:slack|discord|teams|chat|alert|notify|incoming)_hooks?(?:_|\Z)|hook_ur[il]s?(?:_|\Z)|sas_ur[il]s?(?:_|\Z)"
    r"|seed_?phrase|(?:access|recovery|backup|unlock|security|mfa|auth|verification)_?codes?(?:_|\Z)"
)
_PIN = re.compile(r"(?:.*_)?(?:sim)?pin(?:_?(?:codes?|numbers?|nr|no|\d))?|(?:.*_)?(?:cvv|ssn)")
_SHORT_PASSWORD = re.compile(r"(?:db|root|user|my|admin|smtp|mail|ftp|bind|ldap|mysql|pg|u)(?:pass|pw)")
_LAST_MAYBE = {"pat", "sig", "sas", "salt", "key", "keys", "api", "sk", "tok"}
# ``*_tokens`` usually counts a language model's tokens, but these names hold a service's credentials.
_OF_A_SERVICE = re.compile(
    r"(?:.*_)?(?:api|access|auth|refresh|bearer|secret|service|deploy|json|hf|hub|huggingface|github|gitlab|gh|gl|git|slack"
    r"|discord|telegram|openai|anthropic|wandb|npm|pypi|aws|gcp|azure|kube|vault|jwt|csrf|oauth)(?:_.*)?_tokens"
)
# Harmless names with a secret word (settings of libraries, numbers, locations of sockets).
_HARMLESS = re.compile(
    r"tokenizers?_.*|nccl_.*|secret_santa|(?:.*_)?token_(?:ids?|counts?|types?|type_ids|limit|len|length|budget|index|dim|name|size)"
    r"|(?:pad|eos|bos|unk|mask|sep|cls|image|special|next|last|first|prev|new|stop|start|end|per|decoder_start|current)"
    r"_token|(?:.*_)?per_token"
    r"|(?:xdg_|desktop_|gnome_|dbus_|kde_)?session_?(?:type|class|id|manager|desktop|name|bus_.*)"
    r"|(?:xdg|desktop|gnome|dbus|kde)_session.*|ssh_auth_sock|(?:.*_)?auth_?(?:type|mode|method|required)"
    r"|(?:.*_)?(?:sort|primary|foreign|public|partition|cache|dict|state|group|lookup|index|object|batch|input|output"
    r"|missing|unexpected|extra|row|column|hash|map|label|target|data|image|text|feature|metric|monitor|loss|optimizer"
    r"|join|merge|config|module|param|parameter|layer|query)_keys?"
)

# Environment variables that are shown with their values, unless their names are secret.
_SHOWN = re.compile(
    r"(?:NCCL|TORCH|TORCHELASTIC|PYTORCH|TORCHINDUCTOR|TORCHDYNAMO|CUDA|CUDNN|CUBLAS|NVIDIA|NVTE|GLOO|TP|OMP|MKL|KMP"
    r"|GOMP|OPENBLAS|NUMEXPR|VECLIB|HSA|ROCR|ROCM|HIP|MIOPEN|RCCL|XLA|TRITON|UCX|UCC|FI|IBV|MLX5|PSM[23]?|OMPI|PMI|PMIX"
    r"|SLURM|SRUN|PBS|LSB|PET|SAFELAUNCH|ACCELERATE|FSDP|DS|DEEPSPEED|TOKENIZERS|TRANSFORMERS|HF_DATASETS|HF_HUB"
    r"|MALLOC|LC|XDG|CONDA|JAX|TF|RAYON|KINETO|PYTHON|PYSPY|MASTER|GROUP|ROLE|LOCAL|NODE|WORLD)_[A-Z0-9_]*"
    r"|PYTHON[A-Z0-9]*|RANK|WORLD_SIZE|LOCAL_RANK|NODE_RANK|CUDA_VISIBLE_DEVICES|[A-Z_]*PATH|[A-Z_]*HOME|PATH|HOME|USER"
    r"|LOGNAME|SHELL|TERM|COLORTERM|LANG|LANGUAGE|TZ|TMPDIR|TMP|TEMP|PWD|OLDPWD|HOSTNAME|HOST|SHLVL|DISPLAY|COLUMNS"
    r"|LINES|VIRTUAL_ENV|LD_PRELOAD|LOADEDMODULES|_LMFILES_|_|CC|CXX|EDITOR|PAGER|CI|NO_COLOR|NPROC|HF_ENDPOINT"
    r"|WANDB_(?:MODE|PROJECT|DIR|SILENT|DISABLED|ENTITY|RUN_ID)|MLFLOW_TRACKING_URI|AWS_(?:DEFAULT_)?REGION"
)


@lru_cache(maxsize=4096)
def kind_of(name: str) -> SecretKind:
    """Returns the kind of value that a variable, option or key called ``name`` probably has."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.lstrip("-"))
    words = re.sub(r"[\s.\-]+", "_", words).lower().strip("_")
    words = re.sub(r"(?<=[a-z])\d+(?=_|\Z)", "", words)  # PASSWORD1
    parts = words.split("_")
    if name in ("PWD", "OLDPWD") or _HARMLESS.fullmatch(words):
        return ""
    for part in parts:
        ending: SecretKind = next((kind for end, kind in _ENDINGS if part.endswith(end)), "")  # type: ignore[misc]
        if part in _PASSWORDS or ending == "password" or _SHORT_PASSWORD.fullmatch(part):
            return "password"
        if part in _SECRETS or ending == "secret":
            return "secret"
    if _PIN.fullmatch(words):
        return "password"
    if _SECRET_PAIRS.search(words) or re.fullmatch(r"[A-Z0-9_]+_KEY", name):
        return "secret"
    if _OF_A_SERVICE.fullmatch(words):
        return "secret"
    return "maybe" if parts[-1] in _LAST_MAYBE or words == "tokens" else ""


def is_secret_name(name: str) -> bool:
    return kind_of(name) != ""


def is_shown(name: str) -> bool:
    """Returns whether an environment variable's value can be shown: its name must be known, and not be secret."""
    return bool(_SHOWN.fullmatch(name)) and not is_secret_name(name)
