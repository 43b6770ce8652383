"""Talks to live runs: the protocol of their sockets, and the discovery of runs."""
