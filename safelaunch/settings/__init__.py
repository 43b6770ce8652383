"""Reads options, configuration files and presets."""
