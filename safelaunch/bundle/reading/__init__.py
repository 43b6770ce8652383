"""Reads evidence from files: bundles, run directories, folders of Flight Recorder dumps.

The files are untrusted: sizes are limited, and no code in them is run. If a file is unreadable, only its part of the
evidence is missing, and a message names the file.
"""
