"""Leases GPUs and ports of a node. A lease is a set of kernel locks, which end with the processes that hold them."""
