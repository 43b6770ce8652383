"""When has a job stopped making progress? Pure."""
