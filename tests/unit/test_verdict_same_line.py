"""Ranks at one line of the user's, ``trainer.fit(model)``, in different parts of the framework that it calls."""

from __future__ import annotations

import pytest
from evidence import C10D, MODULE, SITE, at, entry, in_c10d, job, past, rank, record
from msgspec import structs

from safelaunch.model import Frame, RankEvidence
from safelaunch.verdict.diagnose import diagnose

FIT = at(40, "main")
LIGHTNING = f"{SITE}/lightning/pytorch"
RUN = Frame(f"{LIGHTNING}/trainer/trainer.py", 560, "Trainer.fit")
HOOKS = Frame(f"{LIGHTNING}/trainer/call.py", 208, "_call_callback_hooks")
SYNC = Frame(f"{LIGHTNING}/strategies/ddp.py", 300, "DDPStrategy.reduce")


def below(op: str, *inside: Frame) -> tuple[Frame, ...]:
    return (Frame(C10D, 3245, op), *inside, RUN, FIT, MODULE)


def waits(number: int, op: str, *inside: Frame, recorded: bool = True) -> RankEvidence:
    frames = below(op, *inside)
    pending = structs.replace(entry(op, 4), frames=frames)
    return rank(number, frames, flight=record(*past(3), pending) if recorded else None)


SAVES = (SYNC, Frame(f"{LIGHTNING}/callbacks/model_checkpoint.py", 270, "ModelCheckpoint.on_train_batch_end"), HOOKS)
STOPS = (SYNC, Frame(f"{LIGHTNING}/callbacks/early_stopping.py", 190, "EarlyStopping.on_train_batch_end"), HOOKS)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("world", [2, 4])
def test_the_callbacks_that_differ_are_shown(world: int, recorded: bool) -> None:
    ranks = [waits(0, "broadcast", *SAVES, recorded=recorded)]
    ranks += [waits(number, "all_reduce", *STOPS, recorded=recorded) for number in range(1, world)]
    verdict = diagnose(job(*ranks))
    assert verdict.cause == "collective-mismatch" and 0 in [one.rank for one in verdict.culprits]
    assert {one.frame for one in verdict.culprits} == {FIT}
    others = "rank 1 is" if world == 2 else "ranks 1-3 are"
    told = "Below train.py:40 (main), rank 0 is at model_checkpoint.py:270 (ModelCheckpoint.on_train_batch_end), "
    assert f"{told}{others} at early_stopping.py:190 (EarlyStopping.on_train_batch_end)." in verdict.summary


def test_a_function_of_its_own_where_the_files_are_the_same() -> None:
    trainer = f"{SITE}/transformers/trainer.py"
    saves = (Frame(trainer, 3100, "_save_checkpoint"), Frame(trainer, 2500, "train"))
    steps = (Frame(trainer, 3600, "training_step"), Frame(trainer, 2400, "train"))
    verdict = diagnose(job(waits(0, "broadcast", *saves), *(waits(n, "all_reduce", *steps) for n in (1, 2))))
    told = "rank 0 is at trainer.py:3100 (_save_checkpoint), ranks 1-2 are at trainer.py:3600 (training_step)."
    assert told in verdict.summary


def test_nothing_is_added_where_the_users_own_lines_differ_or_no_framework_is_there() -> None:
    def of_line(line: int, number: int, op: str) -> RankEvidence:
        flight = record(*past(3), entry(op, 4, line=line))
        return rank(number, in_c10d(op, line), flight=flight)

    for lines in ((5, 6), (5, 5)):
        peers = (of_line(lines[1], number, "all_reduce") for number in (1, 2))
        verdict = diagnose(job(of_line(lines[0], 0, "broadcast"), *peers))
        assert verdict.cause == "collective-mismatch" and "elow train.py" not in verdict.summary
