"""What an aborted process wrote last."""

from __future__ import annotations

import pytest

from safelaunch.verdict.reading.failures import last_abort


@pytest.mark.parametrize(
    ("log", "words", "means"),
    [
        (
            "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
            "  what():  [enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:457]"
            " op.preamble.length <= op.nbytes. 4096 vs 64\n",
            "terminate called after throwing an instance of 'gloo::EnforceNotMet' what():",
            "a peer sent 4096 bytes into a call that has room for 64",
        ),
        (
            "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: unspecified launch\n"
            "Exception raised from query at Event.cpp:5 (most recent call first):\nframe #0: c10::Error::Error()\n",
            "'c10::Error' what():  CUDA error: unspecified launch",
            "a C++ exception that nothing caught",
        ),
        ("terminate called without an active exception\n", "without an active", "a C++ exception that nothing caught"),
        ("step 5\nFatal Python error: none_dealloc: fatal\n", "none_dealloc", "the interpreter itself"),
        ("step 5\nfree(): invalid pointer\n", "free(): invalid pointer", "the heap was corrupted"),
        ("double free or corruption (!prev)\n", "double free", "the heap was corrupted"),
        ("*** stack smashing detected ***: terminated\n", "stack smashing", "past the end of a buffer"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0\n", "oom_kill", "out-of-memory killer"),
        ("  what():  std::bad_alloc\n", "std::bad_alloc", "no memory left"),
        ("python: gemm.c:91: pack: Assertion `n > 0' failed.\n", "n > 0", "an assertion"),
    ],
)
def test_last_words(log: str, words: str, means: str) -> None:
    found = last_abort(f"loss 0.5\n{log}")
    assert found is not None
    assert words in found.words and means in found.means


@pytest.mark.parametrize(
    "log",
    [
        "",
        "loss 0.5\n",
        "Fatal Python error: Bus error\n",
        "what is free: malloc_stats()\n",
        "free(): x\n" + "step\n" * 60,
    ],
)
def test_no_last_words(log: str) -> None:
    assert last_abort(log) is None
