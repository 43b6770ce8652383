"""Runs safelaunch with a copier of bundles that stops itself once it has begun (see ``held/copier.py``).

A copy takes less than 0.1 s. On a loaded machine it would end before a test could find and stop it.
"""

import os
from pathlib import Path

from safelaunch.bundle import copier, publication
from safelaunch.cli import entry

os.environ["THE_COPIER"] = copier.__file__
# safelaunch looks for the copier next to this file.
publication.__file__ = os.fspath(Path(__file__).parent / "held" / "publication.py")

if __name__ == "__main__":
    entry()
