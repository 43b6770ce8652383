"""Options, configuration files and presets."""
