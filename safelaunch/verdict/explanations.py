"""The explanations, as one table in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from safelaunch.verdict import framework_frames, own_words, remarks, steps_made
from safelaunch.verdict.branching import diverging_conditions
from safelaunch.verdict.findings import Annotation, Finding
from safelaunch.verdict.gpu_memory import gpu_memory
from safelaunch.verdict.groups import groups_and_gpus
from safelaunch.verdict.guarding import guards
from safelaunch.verdict.node_behind import node_behind
from safelaunch.verdict.skipped_calls import caught_exception, skipped_batch
from safelaunch.verdict.waits import Case
from safelaunch.verdict.wrong_group import another_group, wrong_group

Explanation = Callable[[Case, Finding], Iterator[Annotation]]
# First why the ranks at fault went a different way, then what else is known about the named ranks.
EXPLANATIONS: tuple[tuple[Explanation, ...], ...] = (
    (wrong_group, another_group, guards, framework_frames.frames_below, caught_exception, skipped_batch),
    (
        framework_frames.frames_above,
        diverging_conditions,
        own_words.own_words,
        gpu_memory,
        remarks.debug_detail,
        steps_made.steps_made,
        remarks.driver_errors,
        groups_and_gpus,
        node_behind,
        remarks.wrong_results_before,
    ),
)
