"""Implements ``safelaunch.launch``: starts and watches ranks from a Python program, as ``elastic_launch`` does."""
