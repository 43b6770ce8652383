"""Lets the supervisors of one job communicate, through the store of torchrun's agents."""
