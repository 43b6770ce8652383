"""What the user asked for: options, configuration files, presets."""
