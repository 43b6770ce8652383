"""Helpers for ``/proc``, NVML, the console, threads, deadlines, and untrusted paths, pickles and text."""
