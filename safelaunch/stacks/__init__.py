"""Reads a stack, a system call, an error message or a line of source."""
