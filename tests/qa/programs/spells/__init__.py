"""Healthy programs: a short training with a quiet spell of every kind. ``table.CASES`` has them all."""

from . import children, compute, groups, libraries, stopped, transfers, waits  # noqa: F401
from .table import CASES, Case  # noqa: F401
