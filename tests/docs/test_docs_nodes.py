"""The files that the pages give for schedulers hold together: names, numbers of nodes, mounts, options."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from safelaunch.job.argv import CommandLine, split
from safelaunch.job.torchrun import KNOWN
from safelaunch.settings.options import OWN_OPTIONS, options_of
from safelaunch.supervise.cluster.rendezvous import SharedStore, meeting
from safelaunch.supervise.cluster.store import Address
from tests.docs.pages import blocks

OWN = {option.flag: option.takes_value for option in OWN_OPTIONS}


def titled(page: str, title: str) -> str:
    return next(block.text for block in blocks(page) if block.title == title)


def parsed(words: list[str]) -> CommandLine:
    """As safelaunch reads it; every option is one that it knows."""
    assert words[0] == "safelaunch"
    command = split(words[1:], OWN, KNOWN)
    for word in command.torchrun:
        assert word.partition("=")[0] in KNOWN, word
    for name, value in command.own:
        option = next(option for option in OWN_OPTIONS if option.flag == name)
        if value is not None:
            option.parse_text(value, name)
    assert command.script == ("train.py",)
    return command


def where(command: CommandLine) -> Address:
    found = meeting(command, {})
    assert isinstance(found, SharedStore)
    assert not found.to_start
    return found.address


# --- Kubernetes -------------------------------------------------------------------------------------------------------


def check_job(spec: Mapping[str, Any], first_pod: str) -> None:
    """One pod for each node, with what a pod of safelaunch needs."""
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    command = parsed(container["command"])
    assert command.value_of("--nnodes", shortest="--nn") == str(spec["completions"])
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert command.value_of("--nproc-per-node", shortest="--np") == str(gpus)
    assert where(command) == Address(first_pod, 29400)
    assert container["securityContext"]["capabilities"]["add"] == ["SYS_PTRACE"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert sorted(mounts.values()) == sorted(volumes)
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    own = dict(command.own)
    assert own["--bundle-dir"] in mounts
    folder, _, key = str(own["--cluster-key-file"]).rpartition("/")
    secret = volumes[mounts[folder]]["secret"]
    assert (secret["secretName"], secret["defaultMode"]) == ("safelaunch-key", 0o400)
    assert f"{secret['secretName']} --from-literal={key}=" in " ".join(
        block.text for block in blocks("docs/schedulers.md") if block.language == "console"
    )


def test_the_indexed_job() -> None:
    service, job = yaml.safe_load_all(titled("docs/schedulers.md", "job.yaml"))
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True  # the first pod is asked for before it is ready
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    subdomain = job["spec"]["template"]["spec"]["subdomain"]
    assert subdomain == service["metadata"]["name"]
    check_job(job["spec"], f"{job['metadata']['name']}-0.{subdomain}")


def test_another_launcher_in_the_pods() -> None:
    fragment = next(
        b for b in blocks("docs/schedulers.md") if b.language == "yaml" and not b.title and "command:" in b.text
    )
    words = yaml.safe_load(fragment.text)["command"]
    assert words[:2] == ["safelaunch", "exec"]
    command = split(words[2:], {option.flag: option.takes_value for option in options_of("exec")}, {})
    named = dict(command.own)["--cluster-store"]
    found = meeting(None, {}, named)
    assert isinstance(found, SharedStore)
    assert found.to_start
    _, job = yaml.safe_load_all(titled("docs/schedulers.md", "job.yaml"))
    assert found.address.host == f"{job['metadata']['name']}-0.{job['spec']['template']['spec']['subdomain']}"
    assert found.address.port != 29400


# --- TorchX -----------------------------------------------------------------------------------------------------------


def specs() -> types.ModuleType:
    """What the component takes of ``torchx.specs``, by the names of TorchX 0.7."""
    module = types.ModuleType("torchx.specs")
    module.macros = types.SimpleNamespace(app_id="app", rank0_env="TORCHX_RANK0_HOST")  # type: ignore[attr-defined]
    module.Role = types.SimpleNamespace  # type: ignore[attr-defined]
    module.AppDef = types.SimpleNamespace  # type: ignore[attr-defined]
    return module


def test_the_component(monkeypatch: pytest.MonkeyPatch) -> None:
    torchx = types.ModuleType("torchx")
    torchx.specs = specs()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchx", torchx)
    monkeypatch.setitem(sys.modules, "torchx.specs", torchx.specs)
    namespace: dict[str, Any] = {}
    exec(titled("docs/schedulers.md", "component.py"), namespace)
    (role,) = namespace["train"]("train.py", nodes=3, ranks=4).roles
    assert (role.entrypoint, role.num_replicas, role.args[0]) == ("bash", 3, "-c")
    text = role.args[1].removeprefix("exec ").replace("$${TORCHX_RANK0_HOST:=localhost}", "node0")
    assert "$" not in text
    command = parsed(text.split())
    assert command.value_of("--nnodes", shortest="--nn") == "3"
    assert command.value_of("--nproc-per-node", shortest="--np") == "4"
    assert where(command) == Address("node0", 29400)


# --- Slurm ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("title", "words"), [("train.sbatch", "safelaunch"), ("tasks.sbatch", "safelaunch exec")])
def test_the_scripts_for_sbatch(title: str, words: str) -> None:
    """``tests/e2e/test_slurm.py`` submits the first of them."""
    lines = titled("docs/schedulers.md", title).splitlines()
    assert lines[0] == "#!/bin/bash"
    text = " ".join(line.removesuffix("\\") for line in lines)
    command = text[text.index("srun ") :].split()
    assert f" {words} " in " ".join(command)
    options = {word.partition("=")[0] for word in command if word.startswith("--") and word != "--"}
    assert options <= {*OWN, *KNOWN, "--kill-on-bad-exit"}
