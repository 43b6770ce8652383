"""Tables of the doctor's checks: each fact, its result, and a remedy that fits the place."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from safelaunch.capture import stacks
from safelaunch.cli import doctor
from safelaunch.cli import doctor_node as node
from safelaunch.cli import doctor_rules as rules
from safelaunch.cli.doctor_rules import MIB, Check, Container, Disk, Rights, TorchProbe, Trial, failed, ok, warning
from safelaunch.job import torchrun
from safelaunch.system.console import Display
from safelaunch.system.errors import Failure, UsageError

GIB = 1 << 30

DENIED = Trial("permission denied: CAP_SYS_PTRACE is missing", kind="denied")
WELL = Trial("", 0.02)
HOST = Rights(yama=None, capable=False, seccomp=0, place="host")


# --- stacks -----------------------------------------------------------------------------------------------------------

REMEDIES = [
    # rights, words that the remedy must contain, words that it must not contain
    (replace(HOST, yama=1), ["sysctl kernel.yama.ptrace_scope=0", "setcap"], ["docker", "on the host"]),
    (replace(HOST, yama=2), ["sysctl kernel.yama.ptrace_scope=1", "setcap"], ["docker"]),
    (replace(HOST, yama=3), ["next boot", "/etc/sysctl.d"], ["setcap", "cap-add"]),
    (replace(HOST, yama=3, capable=True), ["next boot"], ["cap-add"]),
    (replace(HOST, place="docker"), ["docker run --cap-add=SYS_PTRACE"], ["sysctl", "podman"]),
    (replace(HOST, place="docker", yama=1), ["--cap-add=SYS_PTRACE", "on the host: sudo sysctl"], ["podman"]),
    (replace(HOST, place="docker", capable=True, seccomp=2), ["seccomp=unconfined"], ["cap-add"]),
    (replace(HOST, place="docker", capable=False, seccomp=2), ["--cap-add=SYS_PTRACE"], ["unconfined"]),
    (replace(HOST, place="podman"), ["podman run --cap-add=SYS_PTRACE"], ["docker"]),
    (replace(HOST, place="kubernetes"), ["securityContext:", 'add: ["SYS_PTRACE"]'], ["docker"]),
    (replace(HOST, place="kubernetes", capable=True, seccomp=2), ["seccompProfile"], ["SYS_PTRACE"]),
    (replace(HOST, place="apptainer"), ["--add-caps CAP_SYS_PTRACE"], ["docker"]),
    (replace(HOST, capable=True), ["SELinux"], ["cap-add", "sysctl"]),
]


@pytest.mark.parametrize(("rights", "must", "must_not"), REMEDIES, ids=[str(row[0]) for row in REMEDIES])
def test_doctor_remedy_for_denied_stacks_fits_place(rights: Rights, must: list[str], must_not: list[str]) -> None:
    check = rules.attach_check(DENIED, rights)
    assert check.result == "failed"
    assert not [word for word in must if word not in check.fix], check.fix
    assert not [word for word in must_not if word in check.fix], check.fix
    assert str(rights) in check.detail


def test_doctor_remedy_in_container_precedes_host_remedy() -> None:
    fix = rules.remedy(replace(HOST, place="docker", yama=1))
    assert fix.index("--cap-add") < fix.index("sysctl")


@pytest.mark.parametrize("rights", [row[0] for row in REMEDIES], ids=str)
def test_doctor_attach_check_passes_if_stacks_are_readable(rights: Rights) -> None:
    check = rules.attach_check(WELL, rights)
    assert (check.result, check.fix) == ("ok", "")
    assert "20 ms" in check.detail


@pytest.mark.parametrize(
    ("rights", "must", "must_not"),
    [
        (replace(HOST, yama=1), ["\n    sudo OWN"], ["sysctl"]),
        (HOST, ["\n    sudo OWN"], ["sysctl"]),  # another user's job
        (replace(HOST, yama=3), ["next boot"], ["sudo OWN"]),
        (replace(HOST, root=True), ["setcap"], ["sudo OWN"]),
        (replace(HOST, capable=True, seccomp=2), ["seccomp"], ["sudo OWN"]),
        (replace(HOST, place="docker"), ["\n    docker exec --privileged --user 0 NODE OWN"], ["sudo"]),
        (replace(HOST, place="podman", root=True), ["\n    podman exec --privileged --user 0 NODE OWN"], ["docker"]),
        (
            replace(HOST, place="kubernetes", root=True),
            ["\n    kubectl debug -it NODE --profile=sysadmin --target=CONTAINER", "-- chroot /proc/1/root OWN"],
            ["docker", "sudo"],
        ),
        (replace(HOST, place="apptainer"), ["--add-caps"], ["docker"]),
    ],
    ids=str,
)
def test_doctor_way_in_is_command_for_running_job(rights: Rights, must: list[str], must_not: list[str]) -> None:
    way = rules.way_in(rights, "OWN", "sudo OWN", "NODE")
    assert all(word in way for word in must), way
    assert not any(word in way for word in must_not), way


ID = "3f4e" + "0" * 60
OF_DOCKER = f"700 1 8:1 /var/lib/docker/containers/{ID}/resolv.conf /etc/resolv.conf rw - ext4 /dev/a rw"
OF_PODMAN = f"700 1 0:24 /containers/storage/overlay-containers/{ID}/userdata/hosts /etc/hosts rw - tmpfs t rw"
VOLUME = f"700 1 8:1 /var/lib/docker/volumes/{ID}/_data /data rw - ext4 /dev/a rw"


@pytest.mark.parametrize(
    ("place", "mounts", "is_by_id"),
    [
        ("docker", OF_DOCKER, True),
        ("podman", OF_PODMAN, True),
        ("docker", VOLUME, False),
        ("kubernetes", OF_DOCKER, False),  # belongs to the pod's first container
    ],
)
def test_doctor_container_in_host_network_is_named_by_id(place: Container, mounts: str, is_by_id: bool) -> None:
    assert node.container(place, mounts) == (ID[:12] if is_by_id else socket.gethostname())


def test_doctor_attach_check_as_root_says_so() -> None:
    assert "as root" in rules.attach_check(WELL, replace(HOST, root=True)).detail
    assert "as root" not in rules.attach_check(WELL, HOST).detail


@pytest.mark.parametrize(
    ("problem", "kind", "fix"),
    [
        ("this py-spy does not know the target's Python: 3.20", "outdated", "pip install -U py-spy"),
        ("no answer within 3 s", "timeout", "overloaded"),
        ("something else", "", "by hand"),
    ],
)
def test_doctor_other_attach_failures_have_own_remedies(problem: str, kind: Failure, fix: str) -> None:
    check = rules.attach_check(Trial(problem, kind=kind), HOST)
    assert check.result == "failed" and problem in check.detail and fix in check.fix
    assert "SYS_PTRACE" not in check.fix


def test_doctor_other_processes_and_native_frames_give_warnings() -> None:
    stranger = rules.stranger_check(DENIED, replace(HOST, yama=1))
    assert (stranger.result, "ptrace_scope=0" in stranger.fix) == ("warning", True)
    assert rules.native_check(Trial("no answer within 15 s")).result == "warning"
    assert rules.stranger_check(WELL, HOST).result == rules.native_check(WELL).result == "ok"


@pytest.mark.parametrize(
    ("environ", "container", "place"),
    [
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, True, "kubernetes"),
        ({"APPTAINER_CONTAINER": "/x.sif"}, False, "apptainer"),
        ({"SINGULARITY_CONTAINER": "/x.sif"}, True, "apptainer"),
        ({}, True, "docker"),
        ({}, False, "host"),
    ],
)
def test_doctor_recognizes_place(
    environ: dict[str, str], container: bool, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "exists", lambda _: False)
    assert node.place(environ, container) == place


# --- the node ---------------------------------------------------------------------------------------------------------


def disk(free: int, total: int = 100 * GIB, kind: str = "ext4") -> Disk:
    return Disk("/tmp", total, free, kind)


NO_DRIVER = "no NVIDIA driver on this node (libnvidia-ml.so.1 not found)"
NOT_PRIVATE = "not a private directory of yours (owner 0, mode 755)"
JUDGED = [
    # check, its result, words of its detail or fix
    (rules.py_spy_check("/bin/py-spy", "0.4.3", (3, 11)), "ok", "0.4.3"),
    (rules.py_spy_check("/bin/py-spy", "0.4.0", (3, 13)), "ok", ""),
    (rules.py_spy_check("/bin/py-spy", "0.3.14", (3, 13)), "failed", "py-spy>=0.4.0"),
    (rules.py_spy_check("/bin/py-spy", "0.3.14", (3, 11)), "ok", ""),
    (rules.py_spy_check("/bin/py-spy", "", (3, 11)), "failed", "no answer"),
    (rules.py_spy_check("", "", (3, 11)), "failed", "not installed"),
    (rules.room_check("/tmp", disk(10 * GIB), "bundles"), "ok", "10.0 GiB free"),
    (rules.room_check("/tmp", disk(64 * MIB), "bundles"), "ok", ""),
    (rules.room_check("/tmp", disk(64 * MIB - 1), "bundles"), "warning", "little for bundles"),
    (rules.room_check("/tmp", disk(8 * MIB), "bundles"), "warning", ""),
    (rules.room_check("/tmp", disk(8 * MIB - 1), "bundles"), "failed", "no room for bundles"),
    (rules.room_check("/tmp", disk(0), "bundles"), "failed", ""),
    (rules.room_check("/tmp", disk(10 * GIB, kind="nfs4"), "bundles"), "warning", "a network disk"),
    (rules.room_check("/tmp", disk(10 * GIB, kind="fuse.sshfs"), "bundles"), "warning", ""),
    (rules.room_check("/tmp", disk(10 * GIB, kind="tmpfs"), "bundles"), "ok", ""),
    (rules.room_check("/tmp", Disk("/tmp", problem="no answer within 4 s"), "bundles"), "failed", "within 4 s"),
    (rules.bundle_check(disk(5 * GIB)), "ok", "on /tmp (ext4)"),
    (rules.bundle_check(disk(5 * GIB, kind="nfs4")), "ok", "a network disk"),
    (rules.bundle_check(disk(1 * MIB, kind="nfs4")), "failed", "no room"),
    (rules.shm_check(disk(64 * MIB, 64 * MIB), "docker"), "warning", "--shm-size"),
    (rules.shm_check(disk(64 * MIB, 64 * MIB), "kubernetes"), "warning", "emptyDir"),
    (rules.shm_check(disk(64 * MIB, 64 * MIB), "host"), "warning", "remount"),
    (rules.shm_check(disk(0, 16 * GIB), "docker"), "warning", "--shm-size"),
    (rules.shm_check(disk(8 * GIB, 16 * GIB, "tmpfs"), "docker"), "ok", ""),
    (rules.run_root_check(Disk("/tmp/safelaunch-7"), NOT_PRIVATE), "failed", "cannot watch jobs"),
    (rules.run_root_check(Disk("/tmp/safelaunch-7"), NOT_PRIVATE), "failed", "XDG_RUNTIME_DIR"),
    (rules.socket_check("/tmp/safelaunch-0", 53), "ok", ""),
    (rules.socket_check("/tmp/safelaunch-0", 107), "ok", ""),
    (rules.socket_check("/tmp/safelaunch-0", 108), "failed", "too long"),
    (rules.port_check("", 32768, 60999), "ok", "32768-60999"),
    (rules.port_check("", 0, 0), "ok", ""),
    (rules.port_check("", 32768, 33000), "warning", "too few"),
    (rules.port_check("", 1024, 65535), "warning", "29500"),
    (rules.port_check("Cannot assign requested address", 32768, 60999), "failed", "ip link set lo up"),
    (rules.hostname_check("node1", ("127.0.0.1",), 0.01, ""), "ok", "127.0.0.1"),
    (rules.hostname_check("node1", ("10.0.0.1",), 5.0, ""), "warning", "/etc/hosts"),
    (rules.hostname_check("node1", (), 0.1, "Name or service not known"), "warning", "/etc/hosts"),
    (rules.hostname_check("node1", (), 8.0, "no answer within 8 s"), "warning", "/etc/hosts"),
    (rules.leftover_check((), (), 0), "ok", "0 live runs"),
    (rules.leftover_check(("/tmp/s/r1",), (), 2), "ok", "2 live runs"),
    (rules.leftover_check(("/tmp/s/r1",), (), 2), "ok", "/tmp/s/r1"),
    (rules.leftover_check((), ("/tmp/s/bundles/a-Z-hang",), 0), "warning", "/tmp/s/bundles/*"),
    (rules.version_check("2.13.0+cpu", "/x/torch", 59), "ok", ""),
    (rules.version_check("2.6.0", "/x/torch", 50), "ok", ""),
    (rules.version_check("2.5.1", "/x/torch", 50), "failed", "older than 2.6"),
    (rules.version_check("1.13", "/x/torch", 50), "failed", ""),
    (rules.version_check("", "/x/torch", 50), "ok", "unknown version"),
    (rules.version_check("3.0", "/x/torch", 0), "warning", "could not be read"),
    (rules.gpu_check(8, "", "", "12.8", True), "ok", "NVML sees 8"),
    (rules.gpu_check(0, NO_DRIVER, "", "", False), "ok", "for the CPU"),
    (rules.gpu_check(0, NO_DRIVER, "", None, False), "ok", NO_DRIVER),
    (rules.gpu_check(0, NO_DRIVER, "", "12.8", False), "warning", "CUDA 12.8"),
    (rules.gpu_check(0, NO_DRIVER, "", "", True), "warning", "/dev/nvidia"),
    (rules.gpu_check(0, "nvidia-ml-py is not installed", "not installed", "", False), "warning", "pip install"),
    (rules.gpu_check(0, "NVML: no answer within 5 s", "timeout", "12.8", True), "failed", "xid"),
]


@pytest.mark.parametrize(("check", "result", "words"), JUDGED)
def test_doctor_check_has_result_and_fix(check: Check, result: str, words: str) -> None:
    assert check.result == result and bool(check.fix) == (result != "ok")
    assert words in f"{check.detail} {check.fix}"


def test_doctor_longest_socket_path_counts_every_part() -> None:
    root = Path("/tmp/safelaunch-0")
    assert node.longest_socket(root) == node.longest_socket(Path("/tmp")) + len("/safelaunch-0")
    assert node.longest_socket(root) > len("/tmp/safelaunch-0/r1/pages/0-0-1.sock")


def test_doctor_disk_kind_comes_from_deepest_mount() -> None:
    mounts = (
        "/dev/a / ext4 rw 0 0\nserver:/x /data nfs4 rw 0 0\n"
        "tmpfs /data/fast\\040one tmpfs rw 0 0\n/dev/b /da xfs rw 0 0\n"
    )
    kinds = {path: node.kind(Path(path), mounts) for path in ("/", "/data/a", "/data/fast one/x", "/database")}
    assert kinds == {"/": "ext4", "/data/a": "nfs4", "/data/fast one/x": "tmpfs", "/database": "ext4"}


# --- torch ------------------------------------------------------------------------------------------------------------

GOOD = TorchProbe(
    python="3.11.7",
    import_s=1.4,
    distributed=True,
    server=True,
    register=True,
    dump=True,
    handlers={"ping": 200, "fr_trace_json": 200, "dump_nccl_trace_json": 404},
    beacon=True,
)
OLD_NCCL = {"ping": 200, "fr_trace_json": 404, "dump_nccl_trace_json": 200}


@pytest.mark.parametrize(
    ("probe", "imported", "beacon", "server", "recorder"),
    [
        (GOOD, "ok", "ok", "ok", "ok"),
        (replace(GOOD, problem="import torch fails: ImportError"), "failed", None, None, None),
        (replace(GOOD, distributed=False), "failed", "ok", None, None),
        (replace(GOOD, import_s=40.0), "warning", "ok", "ok", "ok"),
        (replace(GOOD, beacon=False), "ok", "failed", "ok", "ok"),
        (replace(GOOD, server=False, handlers={}), "ok", "ok", "warning", None),
        (replace(GOOD, register=False), "ok", "ok", "warning", "warning"),
        (replace(GOOD, register=False, handlers=OLD_NCCL), "ok", "ok", "warning", "warning"),
        (replace(GOOD, handlers={"ping": 0}), "ok", "ok", "failed", "warning"),
    ],
)
def test_doctor_torch_checks_follow_probe(
    probe: TorchProbe, imported: str, beacon: str | None, server: str | None, recorder: str | None
) -> None:
    checks = [
        rules.import_check(probe),
        rules.beacon_check(probe),
        rules.server_check(probe),
        rules.recorder_check(probe),
    ]
    assert [check.result if check else None for check in checks] == [imported, beacon, server, recorder]


def test_doctor_beacon_check_names_user_sitecustomize() -> None:
    check = rules.beacon_check(replace(GOOD, chained="/usr/lib/python3/sitecustomize.py"))
    assert check is not None and check.result == "ok" and "/usr/lib/python3/sitecustomize.py" in check.detail


@pytest.mark.parametrize(
    ("stdout", "stderr", "words"),
    [
        (b"", "Traceback\nImportError: libcudart.so.12: cannot open", "libcudart.so.12"),
        (b"", "", "exit status 3"),
        (b"not json\n", "", "exit status 3"),
        (b'{"unknown": 1}\n', "", "exit status 3"),
    ],
)
def test_doctor_probe_without_usable_output_is_problem(stdout: bytes, stderr: str, words: str) -> None:
    assert words in node.parse(stdout, stderr, 3).problem


def test_doctor_probe_is_read_from_last_line() -> None:
    probe = node.parse(b'a greeting\n{"python": "3.11.7", "beacon": true}\n', "", 0)
    assert probe == TorchProbe(python="3.11.7", beacon=True)


# --- all checks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checks", "result"),
    [
        ((), "ok"),
        ((ok("a", ""), ok("b", "")), "ok"),
        ((ok("a", ""), warning("b", "")), "warning"),
        ((warning("a", ""), failed("b", ""), ok("c", "")), "failed"),
    ],
)
def test_doctor_result_is_worst_of_checks(checks: tuple[Check, ...], result: str) -> None:
    assert doctor.worst(checks) == result


CHECKS = (
    ok("torch", "2.13"),
    failed("reading stacks", "permission denied " + "because " * 20, "in the pod:\n  securityContext:\n    x: y"),
)


def test_doctor_text_is_aligned_and_keeps_remedy_lines() -> None:
    lines = doctor.text(CHECKS, width=80, colour=False).splitlines()
    assert lines[0] == "ok       torch           2.13"
    assert lines[1].startswith("failed   reading stacks  permission denied")
    assert lines[2].startswith(" " * 25 + "because")
    assert "         -> in the pod:" in lines and "            " + "    x: y" in lines
    assert lines[-1] == "2 checks: 1 ok, 0 warning, 1 failed"
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("width", [60, 80, 100])
def test_doctor_text_fits_terminal_and_breaks_between_words(width: int) -> None:
    fix = "use --preset hang-debug, which compares what the ranks recorded once they hang; without DDP, DETAIL may work"
    checks = (warning("reading stacks of spawned children", "with a long detail " * 9, fix), *CHECKS)
    lines = doctor.text(checks, width=width, colour=False).splitlines()
    assert max(map(len, lines)) <= width
    assert {word for check in checks for word in f"{check.name} {check.detail} {check.fix}".split()} <= {
        word for line in lines for word in line.split()
    }


def test_doctor_text_with_colour_has_same_words() -> None:
    coloured = doctor.text(CHECKS, width=80, colour=True)
    plain = coloured.replace("\x1b[32m", "").replace("\x1b[31m", "").replace("\x1b[0m", "")
    assert coloured != plain == doctor.text(CHECKS, width=80, colour=False)


def test_doctor_json_has_result_and_checks() -> None:
    document = msgspec.to_builtins(doctor.document(CHECKS))
    assert (document["schema"], document["result"]) == (1, "failed")
    assert set(document["checks"][0]) == {"name", "result", "detail", "fix"}


@pytest.mark.parametrize(("checks", "code"), [(CHECKS, 1), ((warning("a", "b", "c"),), 0)])
def test_doctor_exit_code_is_1_if_check_failed(
    checks: tuple[Check, ...], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *_: checks)
    assert doctor.main([]) == code
    assert capsys.readouterr().out.endswith(f"{int(code == 1)} failed\n")


@pytest.mark.parametrize("color", [True, False])
def test_doctor_results_are_coloured_on_terminal(
    color: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *_: [ok("py-spy", "0.4.3"), failed("torch", "gone", "Install it.")])
    monkeypatch.setattr(doctor, "display", lambda *_: Display(80, color))
    assert doctor.main([]) == 1
    assert ("\x1b[32mok" in capfd.readouterr().out) is color


def test_doctor_without_torch_runs_other_checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def none(_: object) -> None:
        raise UsageError("torch is not installed here", "pip install torch")

    monkeypatch.setattr(torchrun, "find", none)
    environ = {"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": os.fspath(tmp_path)}
    checks = {check.name: check for check in doctor.examine(environ, os.getuid(), tmp_path)}
    assert checks["torch"].result == "failed" and checks["torch"].fix == "pip install torch"
    assert "dump, diagnose and status work" in checks["torch"].detail and "torch" not in checks["GPUs"].detail
    assert {"ports", "run directory", "py-spy"} <= set(checks)


def test_doctor_check_that_raises_is_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the disk is on fire")

    for name in ("_tracing", "_torch", "_node"):
        monkeypatch.setattr(doctor, name, lambda _: ())
    monkeypatch.setattr(node, "run_root", broken)
    checks = doctor.examine({"PATH": os.environ["PATH"]}, os.getuid(), tmp_path)
    assert warning("disks", "the check failed: RuntimeError: the disk is on fire") in checks


def test_doctor_reports_unknown_safelaunch_variable(tmp_path: Path) -> None:
    subject = doctor.DoctorSubject({"SAFELAUNCH_STALL": "3"}, os.getuid(), tmp_path, None, None)
    (configuration,) = doctor._configuration(subject)
    assert configuration is not None
    assert configuration.result == "failed" and "SAFELAUNCH_STALL" in configuration.detail


def test_doctor_denied_py_spy_fails_stack_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in fails like py-spy without CAP_SYS_PTRACE."""
    denied = tmp_path / "py-spy"
    denied.write_text(
        "#!/bin/sh\n"
        '[ "$1" = --version ] && echo py-spy 0.4.3 && exit\n'
        "echo 'Error: Permission denied (os error 13)' >&2\n"
        "exit 1\n"
    )
    denied.chmod(0o755)
    monkeypatch.setattr(stacks, "find_py_spy", lambda given=None: os.fspath(denied))
    subject = doctor.DoctorSubject({}, os.getuid(), tmp_path, None, None)
    py_spy, reading = doctor._tracing(subject)
    assert py_spy is not None and reading is not None
    assert py_spy.result == "ok" and "0.4.3" in py_spy.detail
    assert reading.result == "failed" and "permission denied" in reading.detail and reading.fix


@pytest.mark.torch
def test_doctor_runs_all_checks_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """The examination is real, including torch and py-spy."""
    code = doctor.main(["--json"])
    document = json.loads(capsys.readouterr().out)
    results = {check["name"]: check["result"] for check in document["checks"]}
    assert code == int("failed" in results.values())
    assert {"py-spy", "reading stacks", "torch", "import torch", "worker server", "Flight Recorder"} <= set(results)
    assert {"beacon", "run directory", "socket paths", "/dev/shm", "ports", "host name"} <= set(results)
    for name in ("py-spy", "torch", "import torch", "beacon", "worker server", "run directory", "ports"):
        assert results[name] == "ok", document
    assert not [check for check in document["checks"] if check["detail"].startswith("the check ")]
