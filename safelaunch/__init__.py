"""safelaunch: torchrun that watches the job, finds out which rank and line hung it, and keeps the evidence."""

__version__ = "0.1.0"
