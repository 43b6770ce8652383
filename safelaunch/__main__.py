"""``python -m safelaunch``."""

from safelaunch.cli import entry

if __name__ == "__main__":
    entry()
