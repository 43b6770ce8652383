"""Runs a command that may trace no process: ``refused.py COMMAND ...``.

A seccomp filter forbids ptrace and process_vm_readv, as some container runtimes do, and CAP_SYS_PTRACE is dropped.
"""

import ctypes
import os
import platform
import struct
import sys

PR_CAPBSET_DROP, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 24, 22, 38
CAP_SYS_PTRACE, SECCOMP_MODE_FILTER = 19, 2
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | 1  # EPERM
CALLS = {"x86_64": (101, 310), "aarch64": (117, 270)}[platform.machine()]

lines = [(LOAD, 0, 0, 0)]
for number in CALLS:
    lines += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
lines.append((RETURN, 0, 0, ALLOW))
code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
program = ctypes.create_string_buffer(struct.pack("@HP", len(lines), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(PR_CAPBSET_DROP, CAP_SYS_PTRACE, 0, 0, 0)  # another user has none
if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0):
    sys.exit(f"no seccomp filter: {os.strerror(ctypes.get_errno())}")
os.execv(sys.argv[1], sys.argv[1:])
