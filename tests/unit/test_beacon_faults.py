"""JSON, tracebacks and exit records that the beacon writes without the library."""

from __future__ import annotations

import os
import sys
import traceback
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from safelaunch.beacon import faults, layout, marks
from safelaunch.beacon.imports import _Loader
from safelaunch.beacon.log import without_our_frames
from safelaunch.beacon.page import as_json


@pytest.mark.parametrize(
    "text", ["", "plain", 'a "quoted" \\ path', "tab\tline\nnul\0bell\x07del\x7f", "naïve 例え 🏖️", "</script>"]
)
def test_as_json_output_decodes_to_same_text(text: str) -> None:
    assert msgspec.json.decode(as_json(text)) == text


def test_as_json_replaces_lone_surrogate() -> None:
    assert msgspec.json.decode(as_json("lone \udc80 surrogate")) == "lone ? surrogate"


def files_in_traceback(loader: Any) -> list[str]:
    try:
        _Loader(loader, [lambda module: None]).exec_module(ModuleType("one"))
    except BaseException as error:
        try:
            raise ValueError from error
        except ValueError as other:
            without_our_frames(other)
        return [frame.filename.rpartition("/")[2] for frame in traceback.extract_tb(error.__traceback__)]
    raise AssertionError("it raises")


def test_traceback_hides_beacon_frames() -> None:
    """The same holds for its cause. Only a fault of the beacon's own code shows its frames."""

    class Interrupted:
        def exec_module(self, module: ModuleType) -> None:
            raise KeyboardInterrupt

    assert files_in_traceback(Interrupted()) == ["test_beacon_faults.py", "test_beacon_faults.py"]
    assert files_in_traceback(None)[-1] == "imports.py"


def test_traceback_hides_import_system_frames_next_to_beacon_frames(tmp_path: Any, monkeypatch: Any) -> None:
    from safelaunch.beacon import imports

    (tmp_path / "interrupted_import.py").write_text("raise KeyboardInterrupt\n")
    monkeypatch.syspath_prepend(tmp_path)
    finder = imports._Finder()
    finder._callbacks["interrupted_import"] = [lambda module: None]
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    with pytest.raises(KeyboardInterrupt) as raised:
        import interrupted_import  # type: ignore[import-not-found] # noqa: F401
    without_our_frames(raised.value)
    files = [frame.filename.rpartition("/")[2] for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert [name for name in files if "importlib" in name or name == "imports.py"] == [], files
    assert files[-1] == "interrupted_import.py"


@pytest.mark.parametrize(
    ("raised", "seen", "kept"),
    [(False, False, True), (True, False, True), (True, True, False)],
    ids=["a clean end", "an exception that the supervisor was too busy to look at", "an exception that it has seen"],
)
def test_flight_record_is_saved_at_exit_unless_already_collected(
    monkeypatch: pytest.MonkeyPatch, raised: bool, seen: bool, kept: bool
) -> None:
    words = memoryview(bytearray(layout.SIZE)).cast("Q")
    words[layout.EXCEPTION_NS], words[layout.ACK] = int(raised), int(seen)
    states: list[int] = []
    server = SimpleNamespace(keep_flight_record=lambda path: states.append(words[layout.STATE]), stop=lambda: None)
    monkeypatch.setitem(sys.modules, "_safelaunch_beacon.server", server)  # type: ignore[arg-type]
    for module in (faults, marks):
        monkeypatch.setattr(module, "_words", words)
    monkeypatch.setattr(faults, "_owner", os.getpid())
    faults._at_exit()
    assert states == ([layout.STARTED] if kept else []) and words[layout.STATE] == layout.EXITED


def test_earlier_exceptions_are_recorded_oldest_first() -> None:
    def outermost(first: BaseException | None, *, suppressed: bool = False) -> BaseException:
        try:
            try:
                try:
                    {}["x"]  # type: ignore[index]
                except KeyError:
                    raise ValueError("implicit")  # noqa: B904
            except ValueError as error:
                raise RuntimeError("explicit") from (None if suppressed else first or error)
        except RuntimeError as error:
            return error

    earlier = faults._earlier(outermost(None))
    assert [(record["type"], record["message"], record["explicit"]) for record in earlier] == [
        ("KeyError", "'x'", False),
        ("ValueError", "implicit", True),
    ]
    assert faults._earlier(outermost(None, suppressed=True)) == []
    circle = OSError("its own cause")
    circle.__cause__ = error = outermost(circle)
    assert [record["type"] for record in faults._earlier(error)] == ["OSError"]
    for number in range(200):
        nested = ValueError(number)
        nested.__cause__, error = error, nested
    assert len(faults._earlier(error)) == faults.MAX_EARLIER
