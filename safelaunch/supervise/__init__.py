"""Supervises one job from start to end."""
