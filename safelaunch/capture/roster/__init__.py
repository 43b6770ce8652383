"""Reads what the beacons write to the run directory, without touching the ranks."""
