"""Leases on a node's GPUs and ports: kernel locks that end with their holders."""
