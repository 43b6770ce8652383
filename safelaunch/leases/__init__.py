"""What a job holds on this node while it runs: GPUs and ports, leased by kernel locks that die with their holders.

``store`` locks files, ``tickets`` are the queue of those who wait, ``choose`` decides (pure), ``nvml`` asks the driver,
``gpus`` and ``ports`` take.
"""
