"""Interprets stacks, system calls, error messages and lines of source, without I/O."""
