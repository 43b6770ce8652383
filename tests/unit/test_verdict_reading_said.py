"""What a line of output tells: the statement that printed it, and what the code behind it leaves out."""

from __future__ import annotations

import pytest

from safelaunch.model import Frame
from safelaunch.verdict.reading.said import Left, left_by

SOURCE = """\
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


def of_line(number: int) -> Left | None:
    found = left_by([Frame("/train.py", 20, "train")], lambda path: SOURCE)
    return next((one for one in found if one.frame.line == number), None)


@pytest.mark.parametrize(
    ("line", "printed", "goes", "after", "left_out", "kept"),
    [
        (8, "WARNING:root:rank 3: out of memory, skipping", "continue", "except RuntimeError", (5, 20), (21,)),
        (12, "step 4: a bad tensor([1.]) was dropped", "behind the `try`", "except ValueError", (5,), (14, 20)),
        (14, "loss is nan so this batch is left out", "continue", "if not finite(loss)", (20,), (5, 21)),
        (17, "stopping early", "break", "if step == 7", (5, 20), (21,)),
    ],
)
def test_a_statement_behind_which_the_code_goes_on_elsewhere(
    line: int, printed: str, goes: str, after: str, left_out: tuple[int, ...], kept: tuple[int, ...]
) -> None:
    left = of_line(line)
    assert left is not None and (left.goes, left.after) == (goes, after)
    assert left.has_printed(printed) and not left.has_printed("a line of every step")
    for expected, numbers in ((True, left_out), (False, kept)):
        assert [left.leaves_out(Frame("/train.py", number, "train")) for number in numbers] == [expected] * len(numbers)
    assert not left.leaves_out(Frame("/other.py", left_out[0], "train"))


@pytest.mark.parametrize("line", [19, 21])
def test_what_is_printed_on_the_usual_way_tells_nothing(line: int) -> None:
    assert of_line(line) is None


def test_without_a_source_nothing_is_found() -> None:
    assert not list(left_by([Frame("/train.py", 20, "train")], lambda path: None))
