"""Reports of the handler inside a rank, with a stand-in for torch's batches of sends."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import types
from collections.abc import Iterator

import pytest

from safelaunch.beacon import gil_answer, server

C10D = "torch.distributed.distributed_c10d"


class P2POp:
    def __init__(self, op: object, peer: int, tag: int = 0) -> None:
        self.op, self.peer, self.tag = op, peer, tag


def isend() -> None: ...


def irecv() -> None: ...


def batch_isend_irecv(ops: list[P2POp]) -> threading.Event:
    return threading.Event()


@pytest.fixture
def c10d(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    module = types.ModuleType(C10D)
    module.P2POp = P2POp  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, C10D, module)
    yield module


class Waiting:
    """Thread that rests in a function with some operations."""

    def __init__(self, ops: object, work: Work | None = None) -> None:
        self.go, self.there = threading.Event(), threading.Event()
        target, *more = (exchange,) if work is None else (wait_for, work)
        self.thread = threading.Thread(target=target, args=(ops, *more, self))
        self.thread.start()
        self.there.wait()

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()
        self.thread.join()


def exchange(ops: list[P2POp], waiting: Waiting) -> None:
    batch_isend_irecv(ops)
    waiting.there.set()
    waiting.go.wait()


def test_batch_of_sends_of_waiting_thread_is_reported(c10d: types.ModuleType) -> None:
    with Waiting([P2POp(isend, 2), P2POp(irecv, 0, tag=7)]) as waiting:
        answer = json.loads(gil_answer.as_json())["posted"]
        assert answer == [
            {"thread": waiting.thread.ident, "sends": True, "peer": 2, "tag": 0},
            {"thread": waiting.thread.ident, "sends": False, "peer": 0, "tag": 7},
        ]


class Work:
    def __init__(self, source: int | None = None, *, completed: bool = False) -> None:
        self.source, self.completed = source, completed

    def is_completed(self) -> bool:
        return self.completed

    def _source_rank(self) -> int:
        if self.source is None:
            raise RuntimeError("only a receive has one")
        return self.source


def wait_for(ops: list[P2POp], work: Work, waiting: Waiting) -> None:
    batch_isend_irecv(ops)
    waiting.there.set()
    waiting.go.wait()


@pytest.mark.parametrize(
    ("work", "peers"), [(Work(), [2]), (Work(source=-1), [0]), (Work(completed=True), [2, 0]), (object(), [2, 0])]
)
def test_batch_reports_only_direction_being_waited_for(c10d: types.ModuleType, work: Work, peers: list[int]) -> None:
    c10d.Work = Work  # type: ignore[attr-defined]
    with Waiting([P2POp(isend, 2), P2POp(irecv, 0)], work):
        assert [operation["peer"] for operation in json.loads(gil_answer.as_json())["posted"]] == peers


def test_batch_of_other_objects_is_not_reported(c10d: types.ModuleType) -> None:
    with Waiting([object(), "secret", {"token": 1}]):
        assert json.loads(gil_answer.as_json())["posted"] == []


def test_batch_with_invalid_peer_loses_only_itself(c10d: types.ModuleType) -> None:
    with Waiting([P2POp(isend, "secret")]):  # type: ignore[arg-type]
        answer = json.loads(gil_answer.as_json())
        assert "posted" not in answer and "handling" in answer


def test_rank_without_torch_reports_no_batch() -> None:
    if C10D not in sys.modules:
        assert json.loads(gil_answer.as_json())["posted"] == []


# --- the batch size of the DataLoaders --------------------------------------------------------------------------------


class DataLoader:
    def __init__(self, batch_size: int | None, batch_sampler: object = None) -> None:
        self.batch_size, self.batch_sampler = batch_size, batch_sampler


class Shard(DataLoader):
    """Stand-in for the subclass that accelerate creates."""


class Sampler:
    def __init__(self) -> None:
        self.batch_size = 8


def train(waiting: Waiting) -> None:
    loader, other = DataLoader(32), object()  # noqa: F841 - read by the handler
    val_loader = Shard(None, Sampler())  # noqa: F841
    waiting.there.set()
    waiting.go.wait()


class Training(Waiting):
    def __init__(self) -> None:
        self.go, self.there = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=train, args=(self,))
        self.thread.start()
        self.there.wait()


def test_data_loader_batch_sizes_are_reported(monkeypatch: pytest.MonkeyPatch, c10d: types.ModuleType) -> None:
    module = types.ModuleType("torch.utils.data.dataloader")
    module.DataLoader = DataLoader  # type: ignore[attr-defined]
    with Training():
        assert json.loads(gil_answer.as_json())["batches"] == {}, "torch's loaders are not imported"
        monkeypatch.setitem(sys.modules, module.__name__, module)
        assert json.loads(gil_answer.as_json())["batches"] == {"loader": 32, "val_loader": 8}
        monkeypatch.setitem(vars(sys.modules["__main__"]), "test_loader", Shard(None, Sampler()))
        assert json.loads(gil_answer.as_json())["batches"] == {"loader": 32, "val_loader": 8, "test_loader": 8}


class Loader:
    def __init__(self) -> None:
        self.batch_size = 7


def test_batch_size_lookup_keeps_variables_of_debugged_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracer stops in a function with a DataLoader. Before Python 3.13, its variables are written back then."""
    module = types.ModuleType("torch.utils.data.dataloader")
    module.DataLoader = Loader  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    go, reached, results = threading.Event(), threading.Event(), list[object]()

    def train() -> None:
        DataLoader = module.DataLoader
        loader = DataLoader()
        count = 5
        results.extend((loader.batch_size, count))

    def trace(frame: types.FrameType, event: str, _: object) -> object:
        if frame.f_code is train.__code__ and "count" in frame.f_locals:
            reached.set()
            go.wait()
        return trace if frame.f_code is train.__code__ else None

    def debugged() -> None:
        sys.settrace(trace)  # type: ignore[arg-type]
        train()

    thread = threading.Thread(target=debugged)
    thread.start()
    reached.wait()
    gil_answer._batches()
    go.set()
    thread.join()
    assert results == [7, 5]


class Group:
    """Process group with these backends by device."""

    def __init__(self, **backends: str) -> None:
        self._device_types = list(backends)
        self._backends = backends

    def _get_backend(self, device: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(name=lambda: self._backends[device])


def test_each_recording_backend_gets_handler(c10d: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: dict[Group, object] = {}
    recorded = [Group(cpu="gloo", cuda="nccl2"), Group(cpu="my_own"), Group(cuda="nccl2"), Group(cpu="a/b?c")]
    c10d._world = types.SimpleNamespace(pg_flight_recorder_hooks=hooks)  # type: ignore[attr-defined]

    def attach(group: Group, config: object, ranks: list[int]) -> None:
        if group in recorded:
            hooks[group] = object()

    c10d._maybe_attach_flight_recorder = attach  # type: ignore[attr-defined]
    monkeypatch.setattr(server, "_backends", [])
    added: list[str] = []
    server._follow_recorders(lambda name, answer: added.append(name))
    for group in (*recorded, Group(cpu="gloo"), Group(cpu="fake")):
        c10d._maybe_attach_flight_recorder(group, None, [0])
    assert added == ["safelaunch_flight_record_nccl2", "safelaunch_flight_record_my_own"]


def test_foreign_backend_detects_backend_outside_torch(c10d: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend in Python, for example, completes its calls in its own threads."""
    own = types.ModuleType("torch._C._distributed_c10d")
    vars(own).update(Group=Group, SimpleNamespace=types.SimpleNamespace)
    monkeypatch.setitem(sys.modules, own.__name__, own)

    class OfPython(Group):
        pass

    for groups, foreign in (([Group(cpu="gloo")], False), ([Group(cpu="gloo"), OfPython(cpu="x")], True), ([], False)):
        c10d._world = types.SimpleNamespace(pg_names=dict.fromkeys(groups, "0"))  # type: ignore[attr-defined]
        assert gil_answer._foreign_backend() is foreign


ON_ITS_WAY_OUT = """if True:
    import sys
    from safelaunch.beacon import gil_answer
    def hook(*_: object) -> None:
        print([(one["type"], one["frames"][0]["line"]) for one in gil_answer._handled_exceptions()])
    sys.excepthook = hook
    try:
        sys.last_value = OSError("an old one")  # as a library leaves it that prints an error
        print(gil_answer._handled_exceptions())
    finally:
        raise IndexError("list index out of range")
"""


def test_handled_exceptions_include_uncaught_one_during_excepthook() -> None:
    shown = subprocess.run([sys.executable, "-c", ON_ITS_WAY_OUT], capture_output=True, text=True, timeout=60)
    assert shown.stdout.splitlines() == ["[]", "[('IndexError', 11)]"], shown.stderr
