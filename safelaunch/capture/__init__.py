"""Reads one source of evidence per module. None raises past its stage, or outlives its deadline."""
