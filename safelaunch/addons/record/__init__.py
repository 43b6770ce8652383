"""``safelaunch record``: reports where a running job spends its time, by rank and line."""
