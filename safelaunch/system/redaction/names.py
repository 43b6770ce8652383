"""Decides by a name whether its value is a password, a secret or maybe one, and which variables may be shown."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

# "password": whatever the value is, a number too. "secret": anything but a number, a truth value and the like.
# "maybe": what looks as if nobody had thought it up.
Kind = Literal["password", "secret", "maybe", ""]

# Words of a name, split at _, -, ., spaces and where its case changes.
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
# Words together; and words that say so only where they end the name.
_SECRET_PAIRS = re.compile(
    r"(?:api|access|secret|private|signing|encryption|account|storage|service|license|auth|master|deploy|ssh|shared"
    r"|sas|hmac|session|webhook|instrumentation|priv|openai|my|gpg)_?keys?(?:_|\Z)|connection_?string|conn_?str"
    r"|(?:slack|discord|teams|chat|alert|notify|incoming)_hooks?(?:_|\Z)|hook_ur[il]s?(?:_|\Z)|sas_ur[il]s?(?:_|\Z)"
    r"|seed_?phrase|(?:access|recovery|backup|unlock|security|mfa|auth|verification)_?codes?(?:_|\Z)"
)
_PIN = re.compile(r"(?:.*_)?(?:sim)?pin(?:_?(?:codes?|numbers?|nr|no|\d))?|(?:.*_)?(?:cvv|ssn)")
_SHORT_PASSWORD = re.compile(r"(?:db|root|user|my|admin|smtp|mail|ftp|bind|ldap|mysql|pg|u)(?:pass|pw)")
_LAST_MAYBE = {"pat", "sig", "sas", "salt", "key", "keys", "api", "sk", "tok"}
# Tokens of a language model are counted and printed; these are of a service.
_OF_A_SERVICE = re.compile(
    r"(?:.*_)?(?:api|access|auth|refresh|bearer|secret|service|deploy|json|hf|hub|huggingface|github|gitlab|gh|gl|git|slack"
    r"|discord|telegram|openai|anthropic|wandb|npm|pypi|aws|gcp|azure|kube|vault|jwt|csrf|oauth)(?:_.*)?_tokens"
)
# Names that hold such a word and are harmless (settings of libraries, numbers, locations of sockets).
_HARMLESS = re.compile(
    r"tokenizers?_.*|nccl_.*|secret_santa|(?:.*_)?token_(?:ids?|counts?|types?|type_ids|limit|len|length|budget|index|dim|name|size)"
    r"|(?:pad|eos|bos|unk|mask|sep|cls|image|special|next|last|first|prev|new|stop|start|end|per|decoder_start|current)"
    r"_token|(?:.*_)?per_token"
    r"|(?:xdg_|desktop_|gnome_|dbus_|kde_)?session_?(?:type|class|id|manager|desktop|name|bus_.*)"
    r"|(?:xdg|desktop|gnome|dbus|kde)_session.*|ssh_auth_sock|(?:.*_)?auth_?(?:type|mode|method)"
    r"|(?:.*_)?(?:sort|primary|foreign|public|partition|cache|dict|state|group|lookup|index|object|batch|input|output"
    r"|missing|unexpected|extra|row|column|hash|map|label|target|data|image|text|feature|metric|monitor|loss|optimizer"
    r"|join|merge|config|module|param|parameter|layer|query)_keys?"
)

# Environment variables that are shown with their values unless their names say "secret". Others are named only.
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
def kind_of(name: str) -> Kind:
    """The kind of value that a variable, option or key called ``name`` probably has."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.lstrip("-"))
    words = re.sub(r"[\s.\-]+", "_", words).lower().strip("_")
    words = re.sub(r"(?<=[a-z])\d+(?=_|\Z)", "", words)  # PASSWORD1
    parts = words.split("_")
    if name in ("PWD", "OLDPWD") or _HARMLESS.fullmatch(words):
        return ""
    for part in parts:
        ending: Kind = next((kind for end, kind in _ENDINGS if part.endswith(end)), "")  # type: ignore[misc]
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
    """Whether a variable, option or key called ``name`` probably holds a secret."""
    return kind_of(name) != ""


def is_shown(name: str) -> bool:
    """Whether an environment variable's value may be shown: the variable is known, and its name marks no secret."""
    return bool(_SHOWN.fullmatch(name)) and not is_secret_name(name)
