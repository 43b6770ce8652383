"""Assembles a bundle privately, and publishes it only when it is complete."""
