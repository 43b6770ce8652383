# Run by every Python process that inherits the job's PYTHONPATH. Decides in a few microseconds which of three roles
# this one has (torchrun agent, rank, neither), wakes the beacon in the first two, and then does what Python would have
# done without it: runs the sitecustomize that this one shadows. Nothing may be imported before the role is known.
import os
import sys


def _restore_path(here, env):
    """Takes our directory out of sys.path; returns PYTHONPATH as the user had it, or None where it was not set."""
    sys.path[:] = [entry for entry in sys.path if entry != here]
    parts = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part != here]
    original = os.pathsep.join(parts)
    return original if original or "SAFELAUNCH_PYTHONPATH" in env else None


def _role(env):
    """``agent``, ``rank``, ``spawned`` (its number arrives later, torchrun --run-path), ``candidate`` or None."""
    if env.get("SAFELAUNCH_MODE") == "exec":
        return "rank" if env.get("RANK", "").isdigit() else "candidate"
    agent = env.get("SAFELAUNCH_AGENT_PID")
    parent = str(os.getppid())
    if agent is None:
        return "agent" if parent == env.get("SAFELAUNCH_SUPERVISOR_PID") else None
    if "RANK" in env and "LOCAL_RANK" in env:
        return "rank"
    return "spawned" if parent == agent and "--multiprocessing-fork" in sys.orig_argv else None


def _load(here, name):
    """Loads ``_safelaunch_beacon.<name>`` by path: safelaunch need not be installed in this interpreter."""
    # A bare package with a path: importlib.util would cost every rank 3 ms for the same.
    if "_safelaunch_beacon" not in sys.modules:
        package = type(sys)("_safelaunch_beacon")
        package.__path__ = [os.path.dirname(here)]
        sys.modules["_safelaunch_beacon"] = package
    return __import__("_safelaunch_beacon." + name, fromlist=["start"])


def _wake():
    env = os.environ
    here = os.path.dirname(os.path.abspath(__file__))
    original = _restore_path(here, env)
    run_dir = env.get("SAFELAUNCH_RUN_DIR", "")
    role = _role(env) if run_dir else None
    if role in ("rank", "spawned"):
        # The rank, and so everything that it starts, gets the user's own PYTHONPATH back.
        if original is None:
            env.pop("PYTHONPATH", None)
        else:
            env["PYTHONPATH"] = original
        env.pop("SAFELAUNCH_PYTHONPATH", None)
    if role is not None and os.path.isdir(run_dir):
        _load(here, role if role in ("agent", "candidate") else "rank").start(run_dir, role)


try:
    _wake()
except Exception:  # a fault of ours must never reach the job
    pass

# The sitecustomize that ours shadows (a virtual environment's, a distribution's) runs as if we were not here.
_ours = sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize  # noqa: F401
except ImportError as error:
    if error.name != "sitecustomize":
        raise
    if _ours is not None:
        sys.modules["sitecustomize"] = _ours
