"""What the torch that jobs will use offers to a watchdog, and whether the beacon gets into its processes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from .check import Check, failed, ok, warning

OLDEST_TORCH = (2, 6)
SLOW_IMPORT_S = 20.0


@dataclass(frozen=True, slots=True)
class Probe:
    """What a process of torch's interpreter said. ``problem``: why it said nothing.

    ``handlers``: HTTP status of each handler that was asked of its worker server, 0 where none came.
    ``beacon``: our sitecustomize was run; ``chained``: the user's own, if there is one; ``isolated``: Python ignores
    its environment there.
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


def version_check(version: str, package: str, options: int) -> Check:
    """``options``: how many of torchrun's options were read from its source; 0: our own table has to serve."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    where = f"{version or 'of unknown version'}, {package}"
    if numbers and numbers < OLDEST_TORCH:
        return failed("torch", f"{where}: older than 2.6", "pip install 'torch>=2.6'")
    if not options:
        fix = "every option still passes through; write values as --name=VALUE where a word is taken for the script"
        return warning("torch", f"{where}; its torchrun's options could not be read", fix)
    return ok("torch", f"{where}; {options} spellings of torchrun's options")


def import_check(probe: Probe) -> Check:
    """Whether that torch can be imported at all, and how fast."""
    name = "import torch"
    if probe.problem:
        return failed(name, probe.problem, "what its own python says: python -c 'import torch.distributed'")
    if not probe.distributed:
        return failed(name, "it was built without torch.distributed", "install a build that has it")
    detail = f"in {probe.import_s:.1f} s, Python {probe.python}, " + (f"CUDA {probe.cuda}" if probe.cuda else "no CUDA")
    if probe.import_s > SLOW_IMPORT_S:
        return warning(name, f"{detail}: slow, every rank pays it", "keep the environment on a local disk")
    return ok(name, detail)


def server_check(probe: Probe) -> Check | None:
    """c10d's worker server, the door into a rank that hangs. None where torch was not imported."""
    name = "worker server"
    if probe.problem or not probe.distributed:
        return None
    if not probe.server:
        detail = "this torch has none: no Flight Recorder of a live rank"
        return warning(name, detail, "pip install 'torch>=2.6', a build for Linux")
    if probe.handlers.get("ping") != 200:
        return failed(name, f"it was started and does not answer (status {probe.handlers.get('ping', 0)})", "")
    if not probe.register:
        detail = "it answers; it takes no handlers of ours: no test whether native code holds the GIL"
        return warning(name, detail, "a newer torch has that (2.13 does)")
    return ok(name, "it answers, and takes handlers of ours")


def recorder_check(probe: Probe) -> Check | None:
    """The Flight Recorder, c10d's record of the last collectives. None where torch was not imported."""
    name = "Flight Recorder"
    if probe.problem or not probe.distributed or not probe.server:
        return None
    if probe.handlers.get("fr_trace_json") == 200 and probe.dump and probe.register:
        return ok(name, "of a live rank, with stack frames")
    if probe.handlers.get("fr_trace_json") == 200:
        return warning(name, "of a live rank, without stack frames", "a newer torch gives them (2.13 does)")
    if probe.handlers.get("dump_nccl_trace_json") == 200:
        detail = "this torch tells of NCCL's collectives only, not of gloo's"
        return warning(name, detail, "a newer torch tells of both (2.13 does)")
    return warning(name, "not to be had from a live rank of this torch: verdicts rest on stacks", "a newer torch")


def beacon_check(probe: Probe) -> Check | None:
    """Whether the sitecustomize by which the beacon gets into a rank is run there. None where nothing is known."""
    name = "beacon"
    if probe.problem:
        return None
    if not probe.beacon:
        why = "it ignores its environment (-I or -E, or a wrapper of such)" if probe.isolated else "it was not run"
        fix = "python must honour PYTHONPATH and import site: no -I, -E, -S, no PYTHONPATH of its own in a wrapper"
        return failed(name, f"sitecustomize by PYTHONPATH in torch's python: {why}; steps are not counted", fix)
    return ok(name, "gets into torch's python" + (f"; your {probe.chained} is run after it" if probe.chained else ""))


def hints(environ: Mapping[str, str]) -> Check:
    """Variables that change how a job is started, or what this examination saw."""
    found = []
    if environ.get("SAFELAUNCH_RUN_DIR"):
        found.append("SAFELAUNCH_RUN_DIR is set: this is a process of a watched job")
    if environ.get("PYTHONSAFEPATH"):
        found.append("PYTHONSAFEPATH is set: the script's own directory is not importable; the beacon is")
    if environ.get("PYTHONSTARTUP") and environ.get("PYTHONINSPECT"):
        found.append("PYTHONINSPECT is set: ranks wait for input at their end instead of ending")
    if environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        found.append("CUDA_LAUNCH_BLOCKING=1 slows every job down")
    pet = sorted(name for name in environ if name.startswith("PET_"))
    if pet:
        found.append(f"torchrun takes options from {', '.join(pet)}")
    return ok("environment", "; ".join(found) or "nothing in it changes how jobs are started")


def gpu_check(count: int, missing: str, cuda: str, devices: bool) -> Check:
    """NVML. ``missing``: why it told nothing; ``devices``: there are ``/dev/nvidia*``."""
    if not missing:
        return ok("GPUs", f"{count} by NVML")
    if "nvidia-ml-py" in missing:
        return warning("GPUs", f"{missing}: nothing about GPUs in bundles", "pip install nvidia-ml-py")
    if "no answer" in missing:
        return failed("GPUs", missing, "nvidia-smi hangs as well? sudo dmesg | grep -i xid; the node wants a reboot")
    if devices:
        fix = "docker run --gpus all (NVIDIA_DRIVER_CAPABILITIES=all), or ldconfig -p | grep libnvidia-ml"
        return warning("GPUs", f"{missing}, and yet there are /dev/nvidia*", fix)
    if cuda:
        return warning("GPUs", f"{missing}, and torch is built for CUDA {cuda}", "on a GPU node: is its driver loaded?")
    return ok("GPUs", f"{missing}; torch is built for the CPU")
