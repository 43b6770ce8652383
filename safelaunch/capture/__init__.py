"""Reads the evidence, one source per module. No source raises an error beyond its stage, or outlives its deadline."""
