"""Evidence from files, for a verdict after the fact: bundles, run directories, folders of Flight Recorder dumps.

What is read comes from anywhere and is not trusted: sizes are limited, nothing in it is run, and a file that cannot be
read costs its own part of the evidence and is named.
"""
