"""Runs a command without CAP_SYS_PTRACE: ``refused.py COMMAND ...``."""

import ctypes
import os
import sys

PR_CAPBSET_DROP, CAP_SYS_PTRACE = 24, 19
ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_SYS_PTRACE, 0, 0, 0)  # a user other than root has none
os.execv(sys.argv[1], sys.argv[1:])
