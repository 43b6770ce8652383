"""Communicates with live runs: the protocol of their sockets, and their discovery."""
