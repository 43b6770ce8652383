"""Leases on a node's GPUs and ports: kernel locks that end with their holders.

``store`` locks files and has the queue, ``choose`` decides, ``inventory`` asks the driver, ``gpus`` and ``ports`` take
leases.
"""
