"""Fingerprints of parameters, gradients and buffers, for the supervisor to compare: ``--check-every N``.

Behind every N-th step of an optimizer, a few numbers per tensor are computed on its device and copied to the host
without waiting for them. A later step writes them to a file that the supervisor maps. No communication is added to the
job, and no synchronisation. An error here switches the checks off; the job doesn't notice.

A series is what is checked together: an optimizer's parameters, or the BatchNorm buffers of a DDP module.
``layout.CHECK_*`` describes its file.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import sys
import weakref
from collections import deque
from time import monotonic_ns

from . import imports, layout, log, marks, page

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

MIX = -1640531527  # 2^32 divided by the golden ratio, as a signed word
PIECE = 1 << 20  # elements that are mixed at once: bounds the memory that a check takes
LARGE = 4096  # elements: tensors that have more on average are summed one by one
MOST_SERIES = 8
LARGEST_FILE = 4 << 20

_base = ""
_every = 0
_off = True
_trackers: dict[int, _Tracker] = {}
_by_module: weakref.WeakKeyDictionary[Any, _Buffers] = weakref.WeakKeyDictionary()
_losses: deque[tuple[int, Any]] = deque(maxlen=layout.CHECK_WINDOW)
_loss_steps = 0
_files = 0


def install(base: str, every: int) -> None:
    """Prepares the checks of this rank. ``base``: its page's path."""
    global _base, _every, _off
    _base, _every, _off = base, every, False
    marks.heard_loss = heard_loss
    imports.after_import("torch.nn.parallel.distributed", _wrap_sync)


def detach() -> None:
    """Switches the checks off: in a forked child, and after an error."""
    global _off
    _off = True
    _trackers.clear()
    _losses.clear()


def _failed() -> None:
    log.fault("checks")
    detach()
    try:
        os.close(os.open(_base + layout.CHECK_OFF, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except OSError:
        return  # the run directory is gone or full


def optimizer_stepped(optimizer: Any, args: object, kwargs: object) -> None:
    """torch's optimizer step post hook."""
    if _off:
        return
    try:
        torch = sys.modules["torch"]
        if torch.compiler.is_compiling() or _is_capturing(torch):
            return
        tracker = _trackers.get(id(optimizer))
        if tracker is None:
            tracker = _trackers[id(optimizer)] = _Tracker(torch, optimizer, len(_trackers))
        tracker.stepped()
    except Exception:
        _failed()


def heard_loss(loss: Any) -> None:
    """Implements ``safelaunch.step(loss=...)``. A tensor stays on its device until the next check."""
    global _loss_steps
    if _off:
        return
    try:
        _loss_steps += 1
        _losses.append((_loss_steps, loss.detach() if hasattr(loss, "detach") else float(loss)))
    except Exception:
        _failed()


def _is_capturing(torch: Any) -> bool:
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


# --- what is compared -------------------------------------------------------------------------------------------------


class _Tensor:
    """One tensor of a series. ``group``: the ranks that hold a replica of it; empty if none is known to."""

    def __init__(self, name: str, tensor: Any, group: tuple[int, ...]) -> None:
        self.name, self.tensor, self.group = name, tensor, group


def _modules(torch: Any) -> list[Any]:
    """All modules of this process: an optimizer knows its parameters, but neither their names nor their module."""
    kind = torch.nn.Module
    return [one for one in gc.get_objects() if issubclass(type(one), kind) and "_modules" in one.__dict__]


def _roots(modules: list[Any]) -> list[Any]:
    """Modules that are part of no other one, those of DDP first: they tell what is replicated."""
    inner = {id(child) for one in modules for child in one._modules.values()}
    return sorted((one for one in modules if id(one) not in inner), key=lambda one: not _is_ddp(one))


def _is_ddp(module: Any) -> bool:
    return any(kind.__name__ == "DistributedDataParallel" for kind in type(module).__mro__)


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _ddp_group(ddp: Any) -> tuple[int, ...]:
    """The ranks that DDP keeps equal; empty if a hook of the user's own may keep them apart, as local SGD does."""
    for hook, _ in getattr(ddp, "_comm_hooks", ()):
        ours = str(getattr(hook, "__module__", "")).startswith("torch.distributed.algorithms.ddp_comm_hooks")
        if not ours or getattr(hook, "__name__", "") in ("post_localSGD_hook", "noop_hook"):
            return ()
    return _ranks_of(ddp.process_group)


def _ranks_of(group: Any) -> tuple[int, ...]:
    dist = sys.modules["torch.distributed"]
    ranks = tuple(dist.get_process_group_ranks(group))
    return ranks if len(ranks) > 1 else ()


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "placements") and hasattr(tensor, "to_local") else tensor


def _dtensor_group(tensor: Any) -> tuple[int, ...]:
    """The ranks that hold the same shard: those along the mesh's replicated dimensions."""
    placements = getattr(tensor, "placements", None)
    if placements is None or not hasattr(tensor, "device_mesh"):
        return ()
    if any(not (one.is_replicate() or one.is_shard()) for one in placements):
        return ()
    mesh = tensor.device_mesh
    here = mesh.get_coordinate()
    if here is None:
        return ()
    at = tuple(slice(None) if one.is_replicate() else place for one, place in zip(placements, here, strict=True))
    ranks = tuple(int(rank) for rank in mesh.mesh[at].reshape(-1).tolist())
    return ranks if len(ranks) > 1 else ()


def _named(torch: Any, optimizer: Any) -> tuple[list[_Tensor], list[Any]]:
    """The tensors of an optimizer's series, and the DDP modules among its parameters' owners.

    A DDP module's own parameters belong to it, frozen ones included: DDP makes them equal when it wraps the module.
    """
    trained = [one for group in optimizer.param_groups for one in group["params"]]
    wanted = {id(one) for one in trained}
    found: dict[int, _Tensor] = {}
    wrapped = []
    for root in _roots(_modules(torch)):
        ddp = _is_ddp(root)
        inner = root.module if ddp else root
        named = [(name, one) for name, one in inner.named_parameters() if one is not None]
        if not any(id(one) in wanted for _, one in named):
            continue
        ignored = getattr(root, "parameters_to_ignore", ()) if ddp else ()
        group = _ddp_group(root) if ddp else ()
        if ddp:
            wrapped.append(root)
        for name, one in named:
            if (ddp or id(one) in wanted) and id(one) not in found:
                replicas = group if name not in ignored else ()
                found[id(one)] = _Tensor(_clean(name), one, replicas or _dtensor_group(one))
    for number, one in enumerate(trained):
        if id(one) not in found:
            found[id(one)] = _Tensor(f"parameter {number}", one, _dtensor_group(one))
    return list(found.values()), wrapped


# --- numbers ----------------------------------------------------------------------------------------------------------


class _Prints:
    """Integer fingerprints of tensors: sums of their mixed bits, which neither order nor rounding changes."""

    def __init__(self, torch: Any, tensors: list[Any]) -> None:
        self._torch = torch
        self._batches: list[tuple[list[tuple[int, int, int]], Any, Any]] = []
        by_kind: dict[Any, list[tuple[int, int, int]]] = {}
        for number, tensor in enumerate(tensors):
            for begin in range(0, tensor.numel(), PIECE):
                pieces = by_kind.setdefault((tensor.dtype, tensor.device), [])
                pieces.append((number, begin, min(begin + PIECE, tensor.numel())))
        for (_, device), pieces in by_kind.items():
            self._add(pieces, device)

    def _add(self, pieces: list[tuple[int, int, int]], device: Any) -> None:
        batch: list[tuple[int, int, int]] = []
        for piece in (*pieces, None):
            if piece is None or sum(end - begin for _, begin, end in batch) + piece[2] - piece[1] > PIECE:
                if batch:
                    self._batches.append((batch, *self._places(batch, device)))
                batch = []
            if piece is not None:
                batch.append(piece)

    def _places(self, batch: list[tuple[int, int, int]], device: Any) -> tuple[Any, Any]:
        ends, total = [], 0
        for _, begin, end in batch:
            total += end - begin
            ends.append(total - 1)
        owners = [number for number, _, _ in batch]
        return self._torch.tensor(ends, device=device), self._torch.tensor(owners, device=device)

    def of(self, tensors: list[Any], device: Any) -> Any:
        torch = self._torch
        words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        result = torch.zeros(len(tensors), dtype=torch.int64, device=device)
        flat = {}
        for batch, ends, owners in self._batches:
            parts = []
            for number, begin, end in batch:
                if number not in flat:
                    one = tensors[number].contiguous().view(-1)
                    flat = {number: one.view(words[one.element_size()]) if one.element_size() in words else one}
                parts.append(flat[number][begin:end])
            bits = (torch.cat(parts) if len(parts) > 1 else parts[0]).to(torch.int32)
            mixed = bits * MIX
            mixed ^= mixed >> 15
            mixed *= MIX
            if len(parts) * LARGE < mixed.numel():
                sizes = [end - begin for _, begin, end in batch]
                sums = torch.stack([one.sum(dtype=torch.int64) for one in mixed.split(sizes)])
            else:
                sums = mixed.cumsum(0, dtype=torch.int64)[ends].diff(prepend=ends.new_zeros(1))
            result.index_add_(0, owners.to(device), sums.to(device))
        return result


def _largest(torch: Any, tensors: list[Any], device: Any) -> Any:
    """The largest magnitude of each tensor: exact, free of overflow, and not finite where any element is not."""
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    known = [n for n, one in enumerate(tensors) if one is not None and one.numel() and one.dtype in floats]
    result = torch.zeros(len(tensors), dtype=torch.float64, device=device)
    if known and all(tensors[number].device.type == "cpu" for number in known) and device.type == "cpu":
        # Many times faster there than the norm, of which each device has one kernel for all tensors.
        ends = [torch.stack(tensors[number].detach().aminmax()).double() for number in known]
        result[known] = torch.stack(ends).abs_().amax(1)
        return result
    by_device: dict[Any, list[int]] = {}
    for number in known:
        by_device.setdefault((tensors[number].device, tensors[number].dtype), []).append(number)
    for numbers in by_device.values():
        norms = torch.stack(torch._foreach_norm([tensors[n].detach() for n in numbers], float("inf")))
        result[torch.tensor(numbers, device=device)] = norms.to(device=device, dtype=torch.float64)
    return result


class _Series:
    """The file of one series, and the numbers on their way to it."""

    def __init__(self, torch: Any, key: str, kind: str, tensors: list[_Tensor]) -> None:
        self._torch = torch
        self.tensors = tensors
        self._locals = [_local(one.tensor.detach()) for one in tensors]
        self._prints = _Prints(torch, self._locals)
        self._device = self._locals[0].device
        self._sizes = [one.numel() for one in self._locals]
        self._pending: deque[tuple[list[int], Any, Any]] = deque()
        self._slot = 0
        self._words = self._create({"key": key, "kind": kind})

    def _create(self, about: dict[str, object]) -> memoryview:
        global _files
        groups = sorted({one.group for one in self.tensors})
        about |= {"every": _every, "rank": self._rank(), "groups": groups}
        about["tensors"] = [(one.name, groups.index(one.group)) for one in self.tensors]
        text = json.dumps(about).encode()
        self._begin = layout.CHECK_HEADER + (len(text) + 7) // 8
        self._size = layout.CHECK_SLOT + 3 * len(self.tensors) + 2 * layout.CHECK_WINDOW
        slots = max(2, min(32, LARGEST_FILE // (8 * self._size)))
        self._slots = slots
        path = f"{_base}{layout.CHECK_SUFFIX}{_files}"
        _files += 1
        whole = 8 * (self._begin + slots * self._size)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, whole)
            mapped = mmap.mmap(fd, whole)
        finally:
            os.close(fd)
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

    def still_fits(self) -> bool:
        """Whether the tensors still have the sizes for which the pieces were cut."""
        return [_local(one.tensor).numel() for one in self.tensors] == self._sizes

    def take(self, position: int, extra: Any = None, losses: Iterable[tuple[int, Any]] = ()) -> None:
        """Computes the numbers of this moment. ``extra``: of ``CHECK_WINDOW`` steps, on the device."""
        torch, device = self._torch, self._device
        with torch.no_grad():
            now = [_local(one.tensor.detach()) for one in self.tensors]
            grads = [None if (g := one.tensor.grad) is None else _local(g) for one in self.tensors]
            grads = [None if one is not None and one.is_sparse else one for one in grads]
            known = list(losses)
            parts = [
                self._prints.of(now, device),
                _largest(torch, now, device).view(torch.int64),
                _largest(torch, grads, device).view(torch.int64),
                (extra if extra is not None else torch.zeros(layout.CHECK_WINDOW, dtype=torch.float64, device=device))
                .to(device=device, dtype=torch.float64)
                .view(torch.int64),
            ]
            if known:
                values = [torch.as_tensor(value, dtype=torch.float64).reshape(-1)[:1].to(device) for _, value in known]
                parts.append(torch.cat(values).view(torch.int64))
            numbers = torch.cat(parts)
            host, event = self._to_host(numbers)
        head = [position, monotonic_ns(), len(known), known[0][0] if known else 0]
        self._pending.append((head, host, event))
        self.write()

    def _to_host(self, numbers: Any) -> tuple[Any, Any]:
        if numbers.device.type == "cpu":
            return numbers, None
        torch = self._torch
        device = getattr(torch, numbers.device.type)
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        event = device.Event()
        event.record()
        return host, event

    def write(self) -> None:
        """Writes what has arrived on the host. Never waits."""
        while self._pending and (self._pending[0][2] is None or self._pending[0][2].query()):
            head, host, _ = self._pending.popleft()
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


# --- when -------------------------------------------------------------------------------------------------------------


class _Buffers:
    """The BatchNorm statistics of a DDP module that promises to broadcast its buffers.

    They are equal only between the broadcast and the next forward pass. Where a whole stretch of steps has had no
    broadcast, they are compared as they are.
    """

    def __init__(self, torch: Any, ddp: Any) -> None:
        self._torch, self._ddp = torch, weakref.ref(ddp)
        self._series: _Series | None = None
        self.due = 0
        self.synced = True

    def _tensors(self, ddp: Any) -> list[_Tensor]:
        group = _ddp_group(ddp)
        kind = sys.modules["torch.nn.modules.batchnorm"]._BatchNorm
        ignored = getattr(ddp, "parameters_to_ignore", ())
        found = []
        for prefix, module in ddp.module.named_modules():
            if isinstance(module, kind):
                for short, one in module.named_buffers(recurse=False):
                    name = f"{prefix}.{short}" if prefix else short
                    if name not in ignored:
                        found.append(_Tensor(_clean(name), one, group))
        return found

    def take(self, position: int) -> None:
        ddp = self._ddp()
        tensors = self._tensors(ddp) if ddp is not None else []
        if not tensors:
            return
        if self._series is None or [one.name for one in self._series.tensors] != [one.name for one in tensors]:
            if _files >= MOST_SERIES:
                return
            self._series = _Series(self._torch, "buffers of " + tensors[0].name, "buffers", tensors)
        self._series.tensors = tensors
        self._series.take(position)

    def broadcast(self) -> None:
        """DDP has just made the buffers equal."""
        self.synced = True
        if self.due:
            position, self.due = self.due, 0
            self.take(position)

    def checked(self, position: int) -> None:
        """The parameters are checked at ``position``: the buffers follow at the next broadcast."""
        if not self.synced:
            self.take(position)
        self.due, self.synced = position, False
        if self._series is not None:
            self._series.write()


def _wrap_sync(module: Any) -> None:
    """Learns of each broadcast of DDP's buffers."""
    kind = getattr(module, "DistributedDataParallel", None)
    original = getattr(kind, "_sync_buffers", None)
    if kind is None or original is None:
        return

    def _sync_buffers(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        buffers = None if _off else _by_module.get(self)
        if buffers is not None:
            try:
                buffers.broadcast()
            except Exception:
                _failed()
        return result

    kind._sync_buffers = _sync_buffers


class _Tracker:
    """The checks of one optimizer."""

    def __init__(self, torch: Any, optimizer: Any, number: int) -> None:
        self._torch, self._optimizer, self._number = torch, weakref.ref(optimizer), number
        weakref.finalize(optimizer, _trackers.pop, id(optimizer), None)
        self._series: _Series | None = None
        self._trained: list[int] = []
        self._buffers: list[_Buffers] = []
        self._steps = 0
        self._so_far: Any = None  # the largest local gradient of the sentinel in this step
        self._window: Any = None

    def stepped(self) -> None:
        self._steps += 1
        if self._series is not None:
            self._series.write()
        if self._window is not None and self._so_far is not None:
            self._window[self._steps % layout.CHECK_WINDOW].copy_(self._so_far)
            self._so_far = None
        if self._steps == 1 or self._steps % _every == 0:
            self._check()

    def _check(self) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        trained = [id(one) for group in optimizer.param_groups for one in group["params"]]
        if self._series is None or trained != self._trained or not self._series.still_fits():
            self._trained = trained
            if not self._begin(optimizer):
                return
        assert self._series is not None
        losses = list(_losses) if self._number == 0 else []
        if self._number == 0:
            _losses.clear()
        self._series.take(self._steps, self._window, losses)
        for buffers in self._buffers:
            buffers.checked(self._steps)

    def _begin(self, optimizer: Any) -> bool:
        tensors, wrapped = _named(self._torch, optimizer)
        tensors = [one for one in tensors if not one.tensor.is_meta]
        if not tensors or _files >= MOST_SERIES:
            return False
        names = "\n".join(one.name for one in tensors)
        import hashlib

        digest = hashlib.blake2b(names.encode(), digest_size=6).hexdigest()
        key = f"{type(optimizer).__name__} {self._number} {digest}"
        self._series = _Series(self._torch, key, "parameters", tensors)
        for ddp in wrapped:
            if ddp not in _by_module and getattr(ddp, "broadcast_buffers", False):
                _by_module[ddp] = _Buffers(self._torch, ddp)
                self._buffers.append(_by_module[ddp])
        if self._window is None:
            self._watch_one([one.tensor for one in tensors if id(one.tensor) in set(self._trained)])
        return True

    def _watch_one(self, trained: list[Any]) -> None:
        """Watches the local gradient of one small parameter near the model's input, in every step.

        What is not finite anywhere in a backward pass gets there, before the ranks' gradients are averaged: it tells
        which rank was first, and in which step.
        """
        torch = self._torch
        early = [one for one in trained if one.requires_grad and one.is_leaf and not hasattr(one, "placements")][:4]
        if not early:
            return
        chosen = min(early, key=lambda one: one.numel())
        if not chosen.dtype.is_floating_point:
            return
        self._window = torch.zeros(layout.CHECK_WINDOW, dtype=torch.float64, device=chosen.device)
        chosen.register_hook(_sentinel(torch, weakref.ref(self), weakref.ref(chosen)))

    def saw(self, size: Any, *, first: bool) -> None:
        """A backward pass has reached the sentinel. ``first``: since the gradients were cleared."""
        again = self._so_far is not None and not first
        self._so_far = self._torch.maximum(self._so_far, size) if again else size


def _sentinel(torch: Any, tracker: Any, parameter: Any) -> Callable[[Any], None]:
    def hook(gradient: Any) -> None:
        if _off:
            return
        try:
            here, watched = tracker(), parameter()
            if here is not None and not (torch.compiler.is_compiling() or _is_capturing(torch)):
                here.saw(
                    torch.linalg.vector_norm(gradient.detach(), float("inf")),
                    first=watched is None or watched.grad is None,
                )
        except Exception:
            _failed()

    return hook
