"""Leases on a node's GPUs and ports: kernel locks that end with their holders.

``store`` locks files and has the queue, ``choose`` decides (pure), ``inventory`` asks the driver, and ``gpus`` and
``ports`` take leases.
"""
