"""Talks to live runs: their sockets' protocol, and their discovery."""
