"""Judges what the jobs' torch offers a watchdog, and whether the beacon starts in its processes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from safelaunch.system.errors import Failure

from .check import Check, failed, ok, warning

OLDEST_TORCH = (2, 6)
SLOW_IMPORT_S = 20.0


@dataclass(frozen=True, slots=True)
class Probe:
    """The answer of torch's interpreter. ``problem``: why there is none.

    ``handlers``: the HTTP status of each handler of its worker server, 0 without an answer. ``beacon``: our
    sitecustomize ran; ``chained``: the user's own one, if any; ``isolated``: Python ignores its environment.
    ``detail``: how a process ended that built a DDP model under TORCH_DISTRIBUTED_DEBUG=DETAIL: ``works``, ``fails``,
    ``hangs``, or the name of the signal that killed it; empty where it was not tried.
    """

    problem: str = ""
    python: str = ""
    cuda: str = ""
    import_s: float = 0.0
    distributed: bool = False
    server: bool = False
    register: bool = False
    dump: bool = False
    handlers: Mapping[str, int] = field(default_factory=dict)
    beacon: bool = False
    chained: str = ""
    isolated: bool = False
    detail: str = ""


def version_check(version: str, package: str, options: int) -> Check:
    """Checks torch's version. ``options``: the number of options read from torchrun's source; 0: our table is used."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    where = f"{version or 'of unknown version'}, {package}"
    if numbers and numbers < OLDEST_TORCH:
        return failed("torch", f"{where}: older than 2.6", "pip install 'torch>=2.6'")
    if not options:
        fix = "all options still pass through; if safelaunch takes a value for the script, write it as --name=VALUE"
        return warning("torch", f"{where}; the options of its torchrun could not be read", fix)
    return ok("torch", f"{where}; {options} spellings of torchrun's options")


def import_check(probe: Probe) -> Check:
    """Checks whether torch can be imported, and how fast."""
    name = "import torch"
    if probe.problem:
        return failed(name, probe.problem, "see its own error: python -c 'import torch.distributed'")
    if not probe.distributed:
        return failed(name, "it was built without torch.distributed", "install a build with torch.distributed")
    detail = f"in {probe.import_s:.1f} s, Python {probe.python}, " + (f"CUDA {probe.cuda}" if probe.cuda else "no CUDA")
    if probe.import_s > SLOW_IMPORT_S:
        return warning(name, f"{detail}: slow, and every rank does it", "keep the environment on a local disk")
    return ok(name, detail)


def server_check(probe: Probe) -> Check | None:
    """Checks c10d's worker server, the door into a rank that hangs. None if torch was not imported."""
    name = "worker server"
    if probe.problem or not probe.distributed:
        return None
    if not probe.server:
        detail = "this torch has none, so safelaunch cannot read a live rank's Flight Recorder"
        return warning(name, detail, "pip install 'torch>=2.6', a build for Linux")
    if probe.handlers.get("ping") != 200:
        return failed(name, f"it starts, but does not answer (status {probe.handlers.get('ping', 0)})", "")
    if not probe.register:
        detail = "it answers, but accepts no handlers, so safelaunch cannot test whether native code holds the GIL"
        return warning(name, detail, "use a newer torch (2.13 accepts handlers)")
    return ok(name, "it answers, and accepts handlers")


def recorder_check(probe: Probe) -> Check | None:
    """Checks the Flight Recorder, c10d's record of the last collectives. None if torch was not imported."""
    name = "Flight Recorder"
    if probe.problem or not probe.distributed or not probe.server:
        return None
    if probe.handlers.get("fr_trace_json") == 200 and probe.dump and probe.register:
        return ok(name, "of a live rank, with stack frames")
    if probe.handlers.get("fr_trace_json") == 200:
        return warning(name, "of a live rank, without stack frames", "use a newer torch (2.13 has them)")
    if probe.handlers.get("dump_nccl_trace_json") == 200:
        detail = "this torch records only NCCL's collectives, not gloo's"
        return warning(name, detail, "use a newer torch (2.13 records both)")
    return warning(
        name, "not available from a live rank of this torch, so verdicts rest on stacks", "use a newer torch"
    )


def detail_check(probe: Probe) -> Check | None:
    """Checks whether a job with DDP survives TORCH_DISTRIBUTED_DEBUG=DETAIL. None if that was not tried."""
    name = "checked collectives"
    if not probe.detail:
        return None
    variable = "TORCH_DISTRIBUTED_DEBUG=DETAIL"
    if probe.detail == "works":
        return ok(name, f"a DDP model can be built under {variable}")
    if probe.detail == "fails":
        return ok(name, f"not tried: no gloo process group could be built for {variable}")
    how = "hangs" if probe.detail == "hangs" else f"ends by {probe.detail}"
    fix = "use --preset hang-debug, which compares what the ranks recorded once they hang; without DDP, DETAIL may work"
    return warning(name, f"with this torch, building a DDP model under {variable} {how}", fix)


def beacon_check(probe: Probe) -> Check | None:
    """Checks whether ranks run the sitecustomize that starts the beacon. None if unknown."""
    name = "beacon"
    if probe.problem:
        return None
    if not probe.beacon:
        why = (
            "that python ignores its environment (-I or -E, or a wrapper with these)"
            if probe.isolated
            else "it did not run"
        )
        fix = "python must use PYTHONPATH and import site: remove -I, -E, -S, and any PYTHONPATH that a wrapper sets"
        return failed(
            name, f"the beacon's sitecustomize does not run in torch's python: {why}; steps are not counted", fix
        )
    return ok(name, "starts in torch's python" + (f"; your {probe.chained} runs after it" if probe.chained else ""))


def hints(environ: Mapping[str, str]) -> Check:
    """Lists variables that change how jobs start, or the results of these checks."""
    found = []
    if environ.get("SAFELAUNCH_RUN_DIR"):
        found.append("SAFELAUNCH_RUN_DIR is set: this process belongs to a watched job")
    if environ.get("PYTHONSAFEPATH"):
        found.append("PYTHONSAFEPATH is set: scripts cannot import from their own directory; the beacon still starts")
    if environ.get("PYTHONSTARTUP") and environ.get("PYTHONINSPECT"):
        found.append("PYTHONINSPECT is set: ranks wait for input at their end instead of exiting")
    if environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        found.append("CUDA_LAUNCH_BLOCKING=1 slows down every job")
    pet = sorted(name for name in environ if name.startswith("PET_"))
    if pet:
        found.append(f"torchrun takes options from {', '.join(pet)}")
    return ok("environment", "; ".join(found) or "no variable changes how jobs start")


def gpu_check(count: int, missing: str, kind: Failure, cuda: str, devices: bool) -> Check:
    """NVML. ``missing``, ``kind``: why it gave nothing; ``devices``: ``/dev/nvidia*`` exist."""
    if not missing:
        return ok("GPUs", f"NVML sees {count}")
    if kind == "not installed":
        return warning("GPUs", f"{missing}: bundles say nothing about GPUs", "pip install nvidia-ml-py")
    if kind == "timeout":
        fix = "if nvidia-smi hangs as well, look for XID errors (sudo dmesg | grep -i xid) and reboot the node"
        return failed("GPUs", missing, fix)
    if devices:
        fix = "docker run --gpus all (NVIDIA_DRIVER_CAPABILITIES=all), or ldconfig -p | grep libnvidia-ml"
        return warning("GPUs", f"{missing}, but /dev/nvidia* exist", fix)
    if cuda:
        fix = "if this is a GPU node, load its driver: nvidia-smi must list the GPUs"
        return warning("GPUs", f"{missing}, but torch is built for CUDA {cuda}", fix)
    return ok("GPUs", f"{missing}; torch is built for the CPU")
