"""Reads evidence from files: bundles, run directories, folders of Flight Recorder dumps.

The files are untrusted: sizes are limited, and nothing in them is run. An unreadable file costs only its own part of
the evidence, and a message names it.
"""
