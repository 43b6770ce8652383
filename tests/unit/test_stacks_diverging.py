"""Conditions on which stacks diverge, loops that a rank has left, and prints before a way out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from safelaunch.model import Frame
from safelaunch.stacks.diverging import diverging_stacks
from safelaunch.stacks.diverging_loops import common_loop, loop_left, loop_returned_from
from safelaunch.stacks.guards import SourceLoop
from safelaunch.stacks.ways_out import WayOut, ways_out
from tests.support.evidence import C10D, MODULE, at

SOURCE = """\
def train():
    for step in range(9):
        try:
            average()
        except StopIteration:
            barrier()
        if step % args.every == 0:
            evaluate()
        if step % EVERY == 0 and loss < best:
            barrier()

def evaluate():
    for x in batches:
        if x is None:
            continue
        reduce(x)
    if score < best:
        save()

def average():
    reduce()
"""


def ways(stack: Sequence[Frame], other: Sequence[Frame], source: str, what: str = "text") -> list[list[object]]:
    """Returns the text or another property of the conditions on each way alone."""
    divergence = diverging_stacks(stack, other, lambda path: source)
    assert divergence is not None
    return [[getattr(each, what) for each in way] for way in divergence.ways]


LOOP = (at(4, "train"), MODULE)
CLEAN_UP, EVALUATES, BEHIND = (at(6, "train"), MODULE), (at(8, "train"), MODULE), (at(10, "train"), MODULE)


@pytest.mark.parametrize(
    ("one", "other", "condition"),
    [
        (BEHIND, LOOP, "if step % EVERY == 0 and loss < best (train.py:9)"),
        (EVALUATES, LOOP, "if step % args.every == 0 (train.py:7)"),
        (CLEAN_UP, LOOP, "except StopIteration (train.py:5)"),
        ((at(16, "evaluate"), *EVALUATES), (at(21, "average"), *LOOP), "if step % args.every == 0 (train.py:7)"),
        ((at(18, "evaluate"), *EVALUATES), (at(16, "evaluate"), *EVALUATES), "if score < best (train.py:17)"),
    ],
)
def test_diverging_stacks_name_condition_of_either_way(
    one: tuple[Frame, ...], other: tuple[Frame, ...], condition: str
) -> None:
    assert ways(one, other, SOURCE, "words") == [[condition], []]
    assert ways(other, one, SOURCE, "words") == [[], [condition]]


@pytest.mark.parametrize(
    ("condition", "by_round"),
    [
        ("step % 10 == 0", True),
        ("(step + 1) % self.args.every == 0 and not DRY", True),
        ("step == 3 and rank == 1", False),
        ("step > self.start", False),
        ("step % every() == 0", False),
        ("self.seen >= 10", True),
        ("self.total >= 10", False),
        ("self.bad >= 10", False),
        ("batch > 3", False),
    ],
)
def test_condition_on_loop_counter_alone_is_by_round(condition: str, by_round: bool) -> None:
    body = "self.seen += 1\n    self.total += len(batch)\n    if batch.bad:\n        self.bad += 1\n    wait()"
    source = f"for step, batch in enumerate(loader):\n    {body}\n    if {condition}:\n        barrier()\n"
    assert ways((at(8, "<module>"),), (at(6, "<module>"),), source, "by_round") == [[by_round], []]


def test_stacks_without_common_function_do_not_diverge() -> None:
    read = lambda path: SOURCE  # noqa: E731
    assert diverging_stacks((at(16, "evaluate"), MODULE), (at(4, "train"), MODULE), read) is None
    assert diverging_stacks(LOOP, LOOP, read) is None
    assert diverging_stacks(LOOP, BEHIND, lambda path: None) is None


def test_two_calls_on_same_line_diverge_inside_function() -> None:
    source = "def fill():\n    while len(rows) < size:\n        gather()\n\ndef fit():\n    reduce()\n\nfit(fill())\n"
    inside, past = (at(3, "fill"), at(8, "<module>")), (at(6, "Agent.fit"), at(8, "<module>"))
    assert ways(inside, past, source) == [["while len(rows) < size"], []]
    assert diverging_stacks(inside, past, lambda path: source.replace("fit(fill())", "each(m)")) is None


ATTEMPTS = """\
def retry(fn):
    for k in range(3):
        try:
            return fn()
        except OSError:
            sleep()

def checks():
    yield any_rank()
    yield any_rank(list(flags))

retry(write)
if any(checks()):
    log()
more()
"""


@pytest.mark.parametrize(
    ("source", "stack", "condition"),
    [
        (ATTEMPTS, (at(4, "retry"), at(12, "<module>")), "except OSError, then another attempt"),
        (ATTEMPTS.replace("sleep()", "raise"), (at(4, "retry"), at(12, "<module>")), None),
        (ATTEMPTS.replace("return fn()", "fn()"), (at(4, "retry"), at(12, "<module>")), None),
        (ATTEMPTS, (at(9, "checks"), at(13, "<module>")), "any(checks())"),
        (
            ATTEMPTS.replace("any(", "any(c for c in "),
            (at(9, "checks"), at(13, "<genexpr>"), at(13, "<module>")),
            "any(c for c in checks())",
        ),
        (ATTEMPTS.replace("any(checks())", "any([*checks()])"), (at(9, "checks"), at(13, "<module>")), None),
        (ATTEMPTS, (at(10, "checks"), at(13, "<module>")), "any(checks())"),
    ],
)
def test_retry_and_short_circuit_are_diverging_conditions(
    source: str, stack: tuple[Frame, ...], condition: str | None
) -> None:
    assert ways(stack, (at(15, "<module>"),), source) == [[condition] if condition is not None else [], []]


ITEMS = """\
def sync():
    for name, (t, how) in entries.items():
        how(t)

def mean(t):
    reduce(t)

def first(t):
    broadcast(t)

def grads():
    for p in parameters():
        for times in range(2):
            mean(p.grad)

for batch in batches:
    sync()
    grads()
"""
SYNC, GRADS = (at(3, "sync"), at(17, "<module>")), (at(6, "mean"), at(14, "grads"), at(18, "<module>"))


@pytest.mark.parametrize(
    ("one", "other", "head"),
    [
        ((at(6, "mean"), *SYNC), (at(9, "first"), *SYNC), "for name, (t, how) in entries.items() (train.py:2)"),
        ((at(6, "mean"), *SYNC), (at(6, "mean"), *SYNC), "for name, (t, how) in entries.items() (train.py:2)"),
        (GRADS, GRADS, "for p in parameters() (train.py:12)"),
        ((at(6, "mean"), *SYNC), GRADS, None),  # at two lines of the loop
        ((at(14, "grads"), at(18, "<module>")), GRADS, None),  # the loop doesn't provide the called function
    ],
)
def test_common_loop_of_both_stacks_is_found(
    one: tuple[Frame, ...], other: tuple[Frame, ...], head: str | None
) -> None:
    source_loop = common_loop(one, other, lambda path: ITEMS)
    assert (source_loop and source_loop[0].words) == head
    assert source_loop is None or source_loop[1][-1].line in (3, 14)


def test_cached_function_is_diverging_condition() -> None:
    source = "@functools.lru_cache(maxsize=None)\ndef padded(n):\n    reduce(n)\n\ndef step():\n"
    source += "    padded(3)\n    reduce(4)\n"
    cached = ways((at(3, "padded"), at(6, "step")), (at(7, "step"),), source)
    assert cached == [["@functools.lru_cache(maxsize=None)"], []]


def line_and_enclosed(loop: SourceLoop | None) -> tuple[int, bool] | None:
    return (loop.line, loop.enclosed) if loop is not None else None


RETURNED = """\
def run():
    if ready:
        evaluate()
        barrier()
    else:
        barrier()
    barrier()

def evaluate():
    for x in batches:
        reduce(x)
    reduce(total)
"""


@pytest.mark.parametrize(
    ("past", "inside", "loop"),
    [
        ((4,), (3, 11), (10, False)),
        ((7,), (3, 11), None),  # possibly by another way
        ((7,), (3, 12), None),  # in no loop
        ((6,), (3, 11), None),  # by another way
        ((2,), (3, 11), None),  # not after the call
        ((3, 12), (3, 11), None),  # in the same call
    ],
)
def test_loop_in_function_that_peer_returned_from_is_found(
    past: tuple[int, ...], inside: tuple[int, ...], loop: tuple[int, bool] | None
) -> None:
    names = ("run", "evaluate")
    stacks = [tuple(at(line, name) for line, name in zip(way, names, strict=False))[::-1] for way in (past, inside)]
    read = lambda path: RETURNED  # noqa: E731
    assert line_and_enclosed(loop_returned_from(*stacks, read)) == loop
    again = [(*stack, at(14, "<module>")) for stack in stacks]
    source_loop = loop_returned_from(*again, lambda path: RETURNED + "while True:\n    run()\n")
    assert line_and_enclosed(source_loop) == (loop and (10, True))


def test_return_inside_loop_counts_as_its_break() -> None:
    source = RETURNED.replace("        reduce(x)\n", "        reduce(x)\n        if over:\n            return\n")
    source_loop = loop_returned_from((at(4, "run"),), (at(11, "evaluate"), at(3, "run")), lambda path: source)
    assert source_loop is not None and (source_loop.line, source_loop.breaks) == (10, ("`if over` at line 12",))


@pytest.mark.parametrize(("given", "by_round"), [("step", True), ("n=step", True), ("loss", False)])
def test_loop_counter_passed_as_argument_is_by_round(given: str, by_round: bool) -> None:
    source = "class Log:\n    def add(self, n):\n        if n % 3:\n            return\n        gather()\n\n"
    source += f"for step in range(9):\n    log.add({given})\n    average()\n"
    assert ways((at(5, "Log.add"), at(8, "<module>")), (at(9, "<module>"),), source, "by_round") == [[by_round], []]


# --- loops that a rank has left ---------------------------------------------------------------------------------------

ROUNDS = """
def train():
    setup()
    for batch in loader:
        if rank == 0:
            log(batch)
        step(batch)
    finish()

def other():
    finish()
"""


@pytest.mark.parametrize(
    ("ahead", "behind", "loop"),
    [(8, 7, 4), (6, 7, None), (7, 8, None), (3, 7, None), (11, 7, None), (7, 7, None)],
)
def test_left_loop_is_found(ahead: int, behind: int, loop: int | None) -> None:
    stacks = [(Frame(C10D, 1, "barrier"), at(line, "train"), MODULE) for line in (ahead, behind)]
    source_loop = loop_left(stacks[0], stacks[1], lambda path: ROUNDS)
    assert line_and_enclosed(source_loop) == ((loop, False) if loop else None)


@pytest.mark.parametrize(
    ("source", "ahead", "behind", "caller"),
    [
        ("for epoch in e:\n    for x in y:\n        step()\n    barrier()\n", 4, 3, None),
        ("for x in y:\n    step()\nbarrier()\nwhile more:\n    main()\n", 3, 2, 5),
    ],
)
def test_left_loop_inside_loop_is_enclosed(source: str, ahead: int, behind: int, caller: int | None) -> None:
    callers = (at(caller, "<module>"),) if caller else ()
    source_loop = loop_left((at(ahead, "f"), *callers), (at(behind, "f"), *callers), lambda path: source)
    assert source_loop is not None and source_loop.enclosed


def test_left_loop_needs_source() -> None:
    stacks = [(at(line, "train"), MODULE) for line in (8, 7)]
    assert loop_left(stacks[0], stacks[1], lambda path: None) is None
    assert loop_left(stacks[0], stacks[1], lambda path: "def broken(:") is None


# --- ways out, and text that the code prints before them --------------------------------------------------------------

PRINTS = """\
def train(loader, log):
    for step, batch in loader:
        try:
            loss = model(batch)
            loss.backward()
        except RuntimeError as error:
            if "out of memory" in str(error):
                log.warning("rank %d: out of memory, skipping", rank)
                continue
            raise
        except ValueError:
            print(f"step {step}: a bad {batch} was dropped")
        if not finite(loss):
            print("loss is", loss, "so this batch is left out")
            continue
        if step == 7:
            print("stopping early")
            break
        print("a line of every step")
        opt.step()
    print("done with everything")
    return step
"""


def of_line(number: int) -> WayOut | None:
    statements = ways_out([Frame("/train.py", 20, "train")], lambda path: PRINTS)
    return next((way_out for way_out in statements if way_out.frame.line == number), None)


@pytest.mark.parametrize(
    ("line", "printed", "goes", "after", "left_out", "kept"),
    [
        (8, "WARNING:root:rank 3: out of memory, skipping", "continue", "except RuntimeError", (5, 20), (21,)),
        (12, "step 4: a bad tensor([1.]) was dropped", "behind the `try`", "except ValueError", (5,), (14, 20)),
        (14, "loss is nan so this batch is left out", "continue", "if not finite(loss)", (20,), (5, 21)),
        (17, "stopping early", "break", "if step == 7", (5, 20), (21,)),
    ],
)
def test_way_out_after_print_skips_following_lines(
    line: int, printed: str, goes: str, after: str, left_out: tuple[int, ...], kept: tuple[int, ...]
) -> None:
    left = of_line(line)
    assert left is not None and (left.goes, left.after) == (goes, after)
    assert left.has_printed(printed) and not left.has_printed("a line of every step")
    for expected, numbers in ((True, left_out), (False, kept)):
        assert [left.leaves_out(Frame("/train.py", number, "train")) for number in numbers] == [expected] * len(numbers)
    assert not left.leaves_out(Frame("/other.py", left_out[0], "train"))


@pytest.mark.parametrize("line", [19, 21])
def test_print_on_usual_path_is_no_way_out(line: int) -> None:
    assert of_line(line) is None


def test_ways_out_need_source() -> None:
    assert not list(ways_out([Frame("/train.py", 20, "train")], lambda path: None))


SAME = """eval_interval = 10
best = float("inf")
def main(args, every=5):
    limit = args.limit * 2
    for it in range(100):
        if it % eval_interval == 0 and it > limit:
            if it % every == 0:
                if (val_loss < best
                        and lr > 3e-3):
                    gather()
        step()
main(args)
"""


def test_only_conditions_that_can_differ_between_ranks_are_quoted() -> None:
    inside, peer = (at(10, "main"), at(12, "<module>")), (at(11, "main"), at(12, "<module>"))
    divergence = diverging_stacks(inside, peer, lambda path: SAME)
    assert divergence is not None
    texts = [guard.text for guard in divergence.ways[0] if not guard.by_round]
    assert texts == ["if val_loss < best and lr > 3e-3"]
    by_hand = SAME.replace("eval_interval = 10", "eval_interval = pick()").replace(
        "main(args)", "main(args, every=pick())"
    )
    divergence = diverging_stacks(inside, peer, lambda path: by_hand)
    assert divergence is not None and len([guard for guard in divergence.ways[0] if not guard.by_round]) == 3


def test_loop_breaks_list_only_conditions_that_can_differ() -> None:
    source = """for it in range(100):
    if it >= 90:
        break
    if stop(loss):
        break
    step()
barrier()
"""
    left = loop_left((at(7, "<module>"),), (at(6, "<module>"),), lambda path: source)
    assert left is not None and left.breaks == ("`if stop(loss)` at line 4",)


def test_condition_on_rank_and_counter_is_not_by_round() -> None:
    source = "best = 1.0\nfor step in range(100):\n    if step == 45 and (0.5 if RANK == 1 else 2.0) < best:\n"
    source += "        gather()\n    step()\n"
    divergence = diverging_stacks((at(4, "<module>"),), (at(5, "<module>"),), lambda path: source)
    assert divergence is not None and [guard.by_round for guard in divergence.ways[0]] == [False]
