"""Interprets stacks, system calls, error messages and source lines. Does no I/O."""
