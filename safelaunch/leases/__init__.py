"""Leases on a node's GPUs and ports: kernel locks that end with their holders.

``store`` locks files, ``tickets`` is the queue, ``choose`` decides (pure), ``inventory`` asks the driver, and ``gpus``
and ``ports`` take leases.
"""
