"""Assembles a bundle privately, and publishes it whole."""
