"""Starts a job, and ends it."""
