"""Detects when a job has stopped making progress. Pure, except for ``progress``, which reads the ranks' pages."""
