"""Computes fingerprints of parameters, gradients and buffers in each rank: ``--check-every N``.

After every N-th step of an optimizer, computes a few numbers per tensor on its device and copies them to the host
asynchronously. A later step writes them to a file that the supervisor maps. The job gets neither additional
communication nor synchronization. An error here only turns the checks off.

A series is a set of tensors that are checked together: an optimizer's parameters, or the BatchNorm buffers of a DDP
module. ``layout`` describes the file of a series.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import sys
import weakref
from collections import deque
from time import monotonic_ns

from ...beacon import imports, log, marks, page, wrappers
from . import fingerprints, layout, replicas

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType
    from typing import Any

VARIABLE = layout.VARIABLE
MOST_SERIES, FEW_SERIES = 64, 8
LARGEST_FILE = 4 << 20
MOST_COPIED = 16 << 10  # largest sentinel gradient, in bytes, to be copied and kept until the next check

_base = ""
_every = 0
_off = True
_trackers: dict[int, _Tracker] = {}
_owners: weakref.WeakKeyDictionary[Any, _Owner] = weakref.WeakKeyDictionary()  # by the module inside DDP
_numbers: dict[str, int] = {}  # number of owners by group
_made = 0
_by_module: weakref.WeakKeyDictionary[Any, _Buffers] = weakref.WeakKeyDictionary()
_steps_of: list[int] = []  # optimizers with a step in progress, outermost first
_losses: deque[tuple[int, Any]] = deque(maxlen=layout.CHECK_WINDOW)
_loss_steps = 0
_files = 0


def install(base: str, value: str) -> None:
    """Prepares the checks. ``base`` is the path of the rank's page, and ``value`` the value of ``VARIABLE``."""
    global _base, _every, _off
    if not (value.isdigit() and int(value)):
        return
    _base, _every, _off = base, int(value), False
    marks.on_loss = record_loss
    imports.after_import("torch.optim.optimizer", log.guarded(_torch_optimizer))
    imports.after_import("torch.nn.parallel.distributed", _wrap_ddp)


def _torch_optimizer(module: ModuleType) -> None:
    if hasattr(module, "register_optimizer_step_post_hook"):
        module.register_optimizer_step_pre_hook(optimizer_steps)
        module.register_optimizer_step_post_hook(optimizer_stepped)


def detach() -> None:
    global _off
    _off = True
    _trackers.clear()
    _losses.clear()


def _fail() -> None:
    log.fault("checks")
    detach()
    _leave(layout.CHECK_OFF)


def _is_full() -> bool:
    if _files < MOST_SERIES:
        return False
    _leave(layout.CHECK_FULL)
    return True


def _leave(suffix: str) -> None:
    try:
        os.close(os.open(_base + suffix, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except OSError:
        return  # the run directory is gone or full


def optimizer_steps(optimizer: Any, args: object, kwargs: object) -> None:
    if _off or sys.modules["torch"].compiler.is_compiling():
        return
    if _steps_of and not _is_under_way(_steps_of[-1]):
        _steps_of.clear()  # an exception ended that step
    _steps_of.append(id(optimizer))


def _is_under_way(optimizer: int) -> bool:
    frame: Any = sys._getframe(3)
    while frame is not None:
        if frame.f_code.co_name in ("wrapper", "step") and id(frame.f_locals.get("self")) == optimizer:
            return True
        frame = frame.f_back
    return False


def optimizer_stepped(optimizer: Any, args: object, kwargs: object) -> None:
    """Counts a step; torch calls this after each one. Ignores steps inside another optimizer's step (ZeRO)."""
    torch = sys.modules["torch"]
    if _off or torch.compiler.is_compiling():
        return
    if _steps_of:
        _steps_of.pop()
    try:
        tracker = _trackers.get(id(optimizer))
        if _steps_of or ((tracker is None or not tracker.on_cpu) and _is_capturing(torch)):
            return
        if tracker is None:
            tracker = _trackers[id(optimizer)] = _Tracker(torch, optimizer)
        tracker.stepped()
    except Exception:
        _fail()


def record_loss(loss: Any) -> None:
    """Implements ``safelaunch.step(loss=...)``. A loss that is a tensor stays on its device until the next check."""
    global _loss_steps
    if _off:
        return
    try:
        _loss_steps += 1
        _losses.append((_loss_steps, loss.detach() if hasattr(loss, "detach") else float(loss)))
    except Exception:
        _fail()


def _is_capturing(torch: Any) -> bool:
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


class _CheckTime:
    """Time of a check. ``position`` and ``rounds`` are equal on all ranks; ``steps`` counts this rank's own steps."""

    def __init__(self, position: int, rounds: int, steps: int) -> None:
        self.position, self.rounds, self.steps = position, rounds, steps


class _SeriesWriter:
    def __init__(self, torch: Any, key: str, kind: str, tensors: list[replicas.Tensor]) -> None:
        self._torch = torch
        self.tensors = tensors
        self._locals = [wrappers.local(tensor.tensor.detach()) for tensor in tensors]
        self._prints = fingerprints.Prints(torch, self._locals)
        devices = [local.device for local in self._locals]
        self._device = next((device for device in devices if device.type != "cpu"), devices[0])
        self.on_cpu = self._device.type == "cpu"
        self._sizes = [local.numel() for local in self._locals]
        self.pending: deque[tuple[list[int], Any, Any]] = deque()
        self._slot = 0
        # The port distinguishes attempts of the job: torchrun uses a new one for each.
        self._words = self._create({"key": f"{key} {os.environ.get('MASTER_PORT', '')}", "kind": kind})

    def _create(self, about: dict[str, object]) -> memoryview:
        global _files
        groups = sorted({tensor.group for tensor in self.tensors})
        about |= {"every": _every, "rank": self._rank(), "groups": groups}
        about["tensors"] = [(tensor.name, groups.index(tensor.group)) for tensor in self.tensors]
        text = json.dumps(about).encode()
        self._begin = layout.CHECK_HEADER + (len(text) + 7) // 8
        self._size = layout.CHECK_SLOT + 3 * len(self.tensors) + 2 * layout.CHECK_WINDOW
        most = 32 if _files < FEW_SERIES else 4  # fewer if many models are trained one after the other
        slots = max(2, min(most, LARGEST_FILE // (8 * self._size)))
        self._slots = slots
        path = f"{_base}{layout.CHECK_SUFFIX}{_files}"
        _files += 1
        whole = 8 * (self._begin + slots * self._size)
        mapped = page.mapped(path, whole)
        page.keep(mapped)
        mapped[8 * layout.CHECK_HEADER : 8 * layout.CHECK_HEADER + len(text)] = text
        words = memoryview(mapped).cast("q")
        words[layout.CHECK_LENGTH], words[layout.CHECK_SLOTS] = len(text), slots
        words[layout.CHECK_SLOT_SIZE] = self._size
        words[0] = layout.CHECK_MAGIC
        return words

    def _rank(self) -> int:
        dist = sys.modules.get("torch.distributed")
        return int(dist.get_rank()) if dist is not None and dist.is_available() and dist.is_initialized() else -1

    def holds(self, tensors: list[replicas.Tensor]) -> bool:
        pairs = zip(self.tensors, tensors, strict=False)
        same = all((a.name, id(a.tensor), a.group) == (b.name, id(b.tensor), b.group) for a, b in pairs)
        return same and len(self.tensors) == len(tensors) and self.still_fits()

    def still_fits(self) -> bool:
        return [wrappers.local(tensor.tensor).numel() for tensor in self.tensors] == self._sizes

    def take(self, moment: _CheckTime, extra: Any = None, losses: Iterable[tuple[int, Any]] = ()) -> None:
        """Computes the numbers for a check at ``moment``. ``extra`` is the sentinel's window, on the device."""
        torch, device = self._torch, self._device
        with torch.no_grad():
            now = [wrappers.local(tensor.tensor.detach()) for tensor in self.tensors]
            grads = [None if (g := tensor.tensor.grad) is None else wrappers.local(g) for tensor in self.tensors]
            grads = [None if grad is not None and grad.is_sparse else grad for grad in grads]
            kept_losses = list(losses)
            parts = [
                self._prints.of(now, device),
                fingerprints.magnitudes(torch, [*now, *grads], device).view(torch.int64),
                fingerprints.on(extra, device).view(torch.int64)
                if extra is not None
                else torch.zeros(layout.CHECK_WINDOW, dtype=torch.int64, device=device),
            ]
            if kept_losses:
                parts.append(self._losses_of([value for _, value in kept_losses]).view(torch.int64))
            numbers = torch.cat(parts)
            host, event = self._to_host(numbers)
        head = [
            moment.position,
            monotonic_ns(),
            len(kept_losses),
            kept_losses[0][0] if kept_losses else 0,
            moment.rounds,
            moment.steps,
        ]
        self.pending.append((head, host, event))
        self.write()

    def _losses_of(self, values: list[Any]) -> Any:
        torch = self._torch
        on_device = [value if hasattr(value, "reshape") and value.device == self._device else None for value in values]
        here = [float(value) for value, tensor in zip(values, on_device, strict=True) if tensor is None]
        moved = iter(fingerprints.on(torch.tensor(here, dtype=torch.float64), self._device).unbind())
        return torch.stack(
            [tensor.reshape(-1).select(0, 0).double() if tensor is not None else next(moved) for tensor in on_device]
        )

    def _to_host(self, numbers: Any) -> tuple[Any, Any]:
        if numbers.device.type == "cpu":
            return numbers, None
        torch = self._torch
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        stream = getattr(torch, numbers.device.type).current_stream(numbers.device)
        return host, stream.record_event()

    def write(self) -> None:
        while self.pending and (self.pending[0][2] is None or self.pending[0][2].query()):
            head, host, _ = self.pending.popleft()
            at = self._begin + (self._slot % self._slots) * self._size
            words = self._words
            words[at] = 2 * self._slot + 1
            words[at + 1 : at + 1 + len(head)] = memoryview(bytearray(b"".join(_word(n) for n in head))).cast("q")
            data = bytearray(ctypes.string_at(host.data_ptr(), 8 * host.numel()))
            first = at + layout.CHECK_SLOT
            words[first : first + host.numel()] = memoryview(data).cast("q")
            words[at] = 2 * self._slot + 2
            self._slot += 1


def _word(number: int) -> bytes:
    return number.to_bytes(8, sys.byteorder, signed=True)


class _Buffers:
    """Checks the BatchNorm statistics of a DDP module.

    They are equal only between the broadcast of buffers and the next forward pass. They are compared without a
    broadcast only if the module was used but didn't broadcast since the last check. Without ``broadcast_buffers``,
    nothing keeps them equal.
    """

    def __init__(self, torch: Any, ddp: Any, key: str) -> None:
        self._torch, self._ddp, self._key = torch, weakref.ref(ddp), key
        self._series: _SeriesWriter | None = None
        self.due: _CheckTime | None = None
        self.synced = True

    def _tensors(self, ddp: Any) -> list[replicas.Tensor]:
        group = replicas.ddp_group(ddp) if _broadcasts(ddp) else ()
        kind = sys.modules["torch.nn.modules.batchnorm"]._BatchNorm
        ignored = getattr(ddp, "parameters_to_ignore", ())
        tensors = []
        for prefix, module in ddp.module.named_modules():
            if isinstance(module, kind):
                for short, buffer in module.named_buffers(recurse=False):
                    name = f"{prefix}.{short}" if prefix else short
                    if name not in ignored:
                        tensors.append(replicas.Tensor(wrappers.clean(name), buffer, group))
        return tensors

    def take(self, moment: _CheckTime) -> None:
        ddp = self._ddp()
        tensors = self._tensors(ddp) if ddp is not None else []
        if not tensors:
            return
        if self._series is None or [tensor.name for tensor in self._series.tensors] != [
            tensor.name for tensor in tensors
        ]:
            if _is_full():
                return
            self._series = _SeriesWriter(self._torch, f"buffers of {self._key}", "buffers", tensors)
        self._series.tensors = tensors
        self._series.take(moment)

    def broadcast(self) -> None:
        self.synced = True
        if self.due is not None:
            moment, self.due = self.due, None
            self.take(moment)

    def is_unshared(self) -> bool:
        """Returns whether DDP's state shows that the module was used without a broadcast.

        False for a module that was later wrapped in another DDP, because it isn't expected to stay equal.
        """
        ddp = self._ddp()
        if self.synced or ddp is None:
            return False
        will_broadcast = getattr(ddp, "modules_buffers", ()) and getattr(ddp, "require_forward_param_sync", False)
        if will_broadcast and _broadcasts(ddp):
            return False  # its next forward pass would have broadcast, so it didn't run
        return not any(other_ddp.module is ddp.module and its.synced for other_ddp, its in _by_module.items())

    def checked(self, moment: _CheckTime) -> None:
        """Schedules a check of the buffers at the next broadcast; it counts as made at ``moment``."""
        self.due, self.synced = moment, False
        if self._series is not None:
            self._series.write()


def _broadcasts(ddp: Any) -> bool:
    return bool(getattr(ddp, "broadcast_buffers", False))


def _wrap_ddp(module: Any) -> None:
    """Hooks into DDP's constructor, its forward passes that announce gradient averaging, and its buffer broadcasts."""
    kind = getattr(module, "DistributedDataParallel", None)
    if kind is None:
        return

    def made(ddp: Any) -> None:
        global _made
        _made += 1
        _owner_of(sys.modules["torch"], ddp, made=True)

    def announced(ddp: Any) -> None:
        owner = _owners.get(ddp.module)
        if owner is not None and ddp.require_backward_grad_sync and sys.modules["torch"].is_grad_enabled():
            owner.ready = True

    def broadcast(ddp: Any) -> None:
        buffers = _by_module.get(ddp)
        if buffers is not None:
            buffers.broadcast()

    for name, then in (("__init__", made), ("_pre_forward", announced), ("_sync_buffers", broadcast)):
        if hasattr(kind, name):
            setattr(kind, name, _followed(getattr(kind, name), then))


def _followed(original: Any, then: Callable[[Any], None]) -> Any:
    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if not _off:
            try:
                then(self)
            except Exception:
                _fail()
        return result

    return wrapper


def _owner_of(torch: Any, ddp: Any, *, made: bool = False) -> _Owner:
    """Returns the owner of a DDP module's tensors. Its number is the same on all ranks of a group.

    Ranks create modules in the same order, but not copies of modules, so copies are numbered separately.
    """
    inner = ddp.module
    if inner not in _owners:
        group = _digest(",".join(map(str, sys.modules["torch.distributed"].get_process_group_ranks(ddp.process_group))))
        kind = f"{'module' if made else 'copy'} of {group}"
        _numbers[kind] = number = _numbers.get(kind, -1) + 1
        _owners[inner] = _Owner(torch, f"{kind} {number}")
    return _owners[inner]


def _by_names(tensors: list[replicas.Tensor]) -> str:
    kind = _digest("\n".join(f"{tensor.name} {bool(tensor.group)}" for tensor in tensors))
    _numbers[kind] = number = _numbers.get(kind, -1) + 1
    return f"tensors {kind} {number}"


def _digest(text: str) -> str:
    import hashlib

    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


class _Owner:
    """Tensors that are checked at the same steps: a DDP module's tensors, or all others of an optimizer.

    A DDP module counts rounds: steps before which gradients were averaged. All of its ranks make the same number of
    rounds, whatever optimizers they use. Because a rank can make more steps alone, these are counted from the last
    round. ``key`` is equal on all ranks.
    """

    def __init__(self, torch: Any, key: str) -> None:
        self._torch, self.key = torch, key
        self._series: _SeriesWriter | None = None
        self.ready = False  # a forward pass announced gradient averaging
        self._rounds = self._since = self._steps = 0  # since: steps after the last round; steps: all steps of this rank
        self._leader: Any = None  # optimizer whose steps are counted; another one's step in the same round isn't
        self.buffers: list[_Buffers] = []
        self._so_far: list[Any] = []  # sentinel's local gradients in this step: copies, or their magnitude
        self._copied: tuple[Any, int] | None = None  # dtype and size in bytes of copied gradients
        self._window: Any = None  # largest gradients of the last steps, by step modulo its length
        self._recent: deque[Any] = deque(maxlen=layout.CHECK_WINDOW)  # gradients of the steps since the last check

    @property
    def on_cpu(self) -> bool:
        return self._series is not None and self._series.on_cpu

    def stepped(self, optimizer: Any) -> bool:
        leader = self._leader() if self._leader is not None else None
        if not self.ready and leader not in (None, optimizer):
            return False
        self._leader = weakref.ref(optimizer)
        self._rounds, self._since = (self._rounds + 1, 0) if self.ready else (self._rounds, self._since + 1)
        self.ready = False
        self._steps += 1
        if self._series is not None and self._series.pending:
            self._series.write()
        if self._window is not None:
            self._recent.append(self._so_far)
            self._so_far = []
        return self._rounds + self._since == 1 or (self._rounds + self._since) % _every == 0

    def hold(self, tensors: list[replicas.Tensor], trained: set[int]) -> None:
        tensors = [tensor for tensor in tensors if not tensor.tensor.is_meta]
        same = self._series is not None and self._series.holds(tensors)
        if same or not tensors or _is_full():
            return
        self._series = _SeriesWriter(self._torch, self.key or _by_names(tensors), "parameters", tensors)
        if self._window is None:
            self._watch_sentinel([tensor for tensor in tensors if id(tensor.tensor) in trained])

    def still_fits(self) -> bool:
        return self._series is None or self._series.still_fits()

    def check(self) -> None:
        if self._series is None:
            return
        moment = _CheckTime(self._rounds + self._since, self._rounds, self._steps)
        losses = list(_losses)
        _losses.clear()
        self._series.take(moment, self._filled_window(), losses)
        for buffers in [buffer for buffer in self.buffers if buffer.is_unshared()]:
            buffers.take(moment)
        for buffers in self.buffers:
            buffers.checked(moment)

    def _watch_sentinel(self, trained: list[replicas.Tensor]) -> None:
        """Watches the local gradient of one small parameter near the model's input, in every step.

        A non-finite value in a backward pass reaches this gradient before gradients are averaged over the ranks. It
        therefore shows on which rank, and in which step, such a value occurred first.
        """
        torch = self._torch
        early = [tensor for tensor in trained if tensor.leaf.requires_grad and tensor.leaf.is_leaf][:4]
        chosen = min(early, key=lambda tensor: tensor.leaf.numel(), default=None)
        if chosen is None or not chosen.leaf.dtype.is_floating_point:
            return
        self._window = torch.zeros(layout.CHECK_WINDOW, dtype=torch.float64, device=chosen.leaf.device)
        local = wrappers.local(chosen.leaf.detach())
        if local.device.type == "cpu" and local.numel() * local.element_size() <= MOST_COPIED:
            self._copied = local.dtype, local.nbytes
        chosen.leaf.register_hook(_sentinel(torch, weakref.ref(self), weakref.ref(chosen.tensor)))

    def _filled_window(self) -> Any:
        window, size = self._window, layout.CHECK_WINDOW
        if window is None or not self._recent:
            return window
        recent = list(self._recent)
        self._recent.clear()
        stacked = self._largest(recent, window)
        first = (self._steps - len(recent) + 1) % size
        fits = min(len(recent), size - first)
        window[first : first + fits].copy_(stacked[:fits])
        window[: len(recent) - fits].copy_(stacked[fits:])
        return window

    def _largest(self, recent: list[list[Any]], window: Any) -> Any:
        torch = self._torch
        if self._copied is None:
            zero = window.new_zeros(())
            return torch.stack([fingerprints.on(largest[0], window.device) if largest else zero for largest in recent])
        counts = [len(copies) for copies in recent]
        if not any(counts):
            return window.new_zeros(len(recent))
        data = torch.frombuffer(bytearray(b"".join(b"".join(copies) for copies in recent)), dtype=self._copied[0])
        largest = data.view(sum(counts), -1).double().abs_().amax(1)
        if set(counts) == {1}:
            return largest
        zero = window.new_zeros(())
        return torch.stack([step.amax() if len(step) else zero for step in largest.split(counts)])

    def on_gradient(self, gradient: Any, parameter: Callable[[], Any]) -> None:
        """Records the sentinel's gradient in a backward pass. Drops earlier ones if ``parameter`` has no gradient.

        On a CPU, it only copies the gradient, and a later call examines all steps together, because one kernel costs as
        much as ten copies.
        """
        if self._so_far and ((watched := parameter()) is None or watched.grad is None):
            self._so_far = []
        if self._copied is not None:
            _, size = self._copied
            if gradient.is_contiguous() and gradient.nbytes == size:  # contiguity first: it might be sparse
                self._so_far.append(ctypes.string_at(gradient.data_ptr(), size))
            return
        largest = self._torch.linalg.vector_norm(gradient.detach(), float("inf"))
        self._so_far = [self._torch.maximum(self._so_far[0], largest) if self._so_far else largest]


class _Tracker:
    def __init__(self, torch: Any, optimizer: Any) -> None:
        self._torch, self._optimizer = torch, weakref.ref(optimizer)
        weakref.finalize(optimizer, _trackers.pop, id(optimizer), None)
        self._rest = _Owner(torch, "")
        self._owners: list[_Owner] = []
        self._trained: list[int] = []
        self._modules = -1  # number of DDP modules when the owners were determined

    @property
    def on_cpu(self) -> bool:
        return bool(self._owners) and all(owner.on_cpu for owner in self._owners)

    def stepped(self) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        if self._modules != _made:
            self._find(optimizer)
        due = [owner for owner in self._owners if owner.stepped(optimizer)]
        if due and not (self._is_same(optimizer) and all(owner.still_fits() for owner in self._owners)):
            before = self._owners
            self._find(optimizer)
            due = [
                owner for owner in self._owners if owner in due or (owner not in before and owner.stepped(optimizer))
            ]
        for due_owner in due:
            due_owner.check()

    def _is_same(self, optimizer: Any) -> bool:
        return self._trained == [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]

    def _find(self, optimizer: Any) -> None:
        self._trained = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        self._modules, self._owners = _made, []
        for ddp, tensors in replicas.owned(optimizer):
            owner = self._rest if ddp is None else _owner_of(self._torch, ddp)
            if tensors:
                owner.hold(tensors, set(self._trained))
                self._owners.append(owner)
            if ddp is not None and ddp not in _by_module:
                _by_module[ddp] = _Buffers(self._torch, ddp, owner.key)
                owner.buffers.append(_by_module[ddp])


def _sentinel(torch: Any, owner: Any, parameter: Any) -> Callable[[Any], None]:
    is_compiling, on_cpu = torch.compiler.is_compiling, parameter().device.type == "cpu"
    local = wrappers.local if hasattr(parameter(), "placements") else None

    def hook(gradient: Any) -> None:
        if _off or is_compiling() or (not on_cpu and _is_capturing(torch)):
            return
        try:
            here = owner()
            if here is not None:
                here.on_gradient(local(gradient) if local is not None else gradient, parameter)
        except Exception:
            _fail()

    return hook
