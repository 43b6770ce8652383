"""``python -m safelaunch``."""

import sys

from safelaunch.cli import main

if __name__ == "__main__":
    sys.exit(main())
