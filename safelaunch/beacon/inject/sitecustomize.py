# Every Python process that inherits the job's PYTHONPATH runs this file. In a few microseconds it decides if the
# process is the torchrun agent, a rank or neither, and starts the beacon in the first two. Then it runs the
# sitecustomize that it shadows. Import nothing before the role is known.
import os
import sys


def _restore_path(here, env):
    # Without our directory. Returns the user's own PYTHONPATH, or None if it wasn't set.
    sys.path[:] = [entry for entry in sys.path if entry != here]
    parts = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part != here]
    original = os.pathsep.join(parts)
    return original if original or "SAFELAUNCH_PYTHONPATH" in env else None


def _role(env):
    """Returns ``agent``, ``rank``, ``spawned``, ``unknown_role``, or None outside a job.

    A ``spawned`` rank (torchrun --run-path) gets its number later. Under safelaunch exec, the role is ``unknown_role``.
    """
    if env.get("SAFELAUNCH_MODE") == "exec":
        return "rank" if env.get("RANK", "").isdigit() else "unknown_role"
    agent = env.get("SAFELAUNCH_AGENT_PID")
    if agent == str(os.getpid()):
        return "agent"
    if "RANK" in env and "LOCAL_RANK" in env:
        return "rank"
    return "spawned" if str(os.getppid()) == agent and "--multiprocessing-fork" in sys.orig_argv else None


def _load(here, name):
    # By path, because this interpreter might not have safelaunch, and as a bare package, because importing
    # importlib.util costs every rank 3 ms.
    if "_safelaunch_beacon" not in sys.modules:
        package = type(sys)("_safelaunch_beacon")
        package.__path__ = [os.path.dirname(here)]
        sys.modules["_safelaunch_beacon"] = package
    return __import__("_safelaunch_beacon." + name, fromlist=["start"])


def _start_beacon():
    env = os.environ
    here = os.path.dirname(os.path.abspath(__file__))
    original = _restore_path(here, env)
    run_dir = env.get("SAFELAUNCH_RUN_DIR", "")
    role = _role(env) if run_dir else None
    if role in ("rank", "spawned"):
        # The rank and its children get the user's own PYTHONPATH back.
        if original is None:
            env.pop("PYTHONPATH", None)
        else:
            env["PYTHONPATH"] = original
        env.pop("SAFELAUNCH_PYTHONPATH", None)
    if role is not None and os.path.isdir(run_dir):
        _load(here, "agent" if role == "agent" else "rank").start(run_dir, role)


try:
    _start_beacon()
except Exception:  # its own errors must never reach the job
    pass

# The shadowed sitecustomize (a virtual environment's, a distribution's) runs as usual.
_ours = sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize  # noqa: F401
except ImportError as error:
    if error.name != "sitecustomize":
        raise
    if _ours is not None:
        sys.modules["sitecustomize"] = _ours
