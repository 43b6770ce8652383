"""Runs another script in a process of which the kernel shows other processes little: ``undumpable.py SCRIPT ...``."""

import ctypes
import runpy
import sys

PR_SET_DUMPABLE = 4
ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
