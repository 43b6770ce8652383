"""Paths of the tests' own files."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
PROGRAMS = ROOT / "tests" / "qa" / "programs"
