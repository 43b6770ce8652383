"""Starts and ends a job."""
