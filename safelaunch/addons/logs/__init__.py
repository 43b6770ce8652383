"""Reads logs and saved stacks of a job, of any launcher, as evidence for a verdict."""
