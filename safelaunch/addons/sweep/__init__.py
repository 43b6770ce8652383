"""Runs many jobs on one node: expands, schedules, journals and summarises a sweep. Each job is a safelaunch run."""
