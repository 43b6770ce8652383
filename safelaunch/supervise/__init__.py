"""Supervises one job from start to end: the loop, stalls, crashes, incidents, and requests to a live run."""
