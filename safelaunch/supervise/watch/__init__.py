"""Detects when a job has stopped making progress. Only ``progress`` has side effects: it reads the ranks' pages."""
