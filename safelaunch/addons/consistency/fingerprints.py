"""Computes fingerprints and magnitudes of tensors, on the devices that hold them."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


SQUARE = 1013904242  # even, so x + SQUARE * x * x maps no two words to the same one
PIECE = 1 << 20  # elements processed at once, to bound a check's memory


# On a CPU, a piece must fit into the cache and into memory that the process already has: fresh pages from the kernel
# cost several times more than the arithmetic.
CPU_PIECE = 1 << 16
LARGE = 4096  # elements: tensors that are larger on average are summed one by one


class Prints:
    """Integer fingerprints of tensors: sums of their mixed bits, which don't depend on the order of summation."""

    def __init__(self, torch: Any, tensors: list[Any]) -> None:
        self._torch = torch
        self._batches: list[tuple[list[tuple[int, int, int]], Any, Any]] = []
        by_kind: dict[Any, list[tuple[int, int, int]]] = {}
        for number, tensor in enumerate(tensors):
            most = _piece(tensor.device)
            for begin in range(0, tensor.numel(), most):
                pieces = by_kind.setdefault((tensor.dtype, tensor.device), [])
                pieces.append((number, begin, min(begin + most, tensor.numel())))
        for (_, device), pieces in by_kind.items():
            self._add(pieces, device)

    def _add(self, pieces: list[tuple[int, int, int]], device: Any) -> None:
        batch: list[tuple[int, int, int]] = []
        # Largest first: otherwise small pieces between them would become separate batches.
        for piece in (*sorted(pieces, key=lambda part: part[1] - part[2]), None):
            if piece is None or sum(end - begin for _, begin, end in batch) + piece[2] - piece[1] > _piece(device):
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
        sums, places = [], []
        for batch, ends, owners in self._batches:
            parts = []
            for number, begin, end in batch:
                if number not in flat:
                    tensor = tensors[number].contiguous().view(-1)
                    flat = {
                        number: tensor.view(words[tensor.element_size()]) if tensor.element_size() in words else tensor
                    }
                parts.append(flat[number].narrow(0, begin, end - begin))
            sums.append(self._sums(parts, ends).to(device, non_blocking=True))
            places.append(owners.to(device, non_blocking=True))
        return result.index_add_(0, torch.cat(places), torch.cat(sums)) if sums else result

    def _sums(self, parts: list[Any], ends: Any) -> Any:
        """Returns the sum of the words of each part, after mixing their high bits into the low bits and vice versa."""
        torch = self._torch
        bits = (torch.cat(parts) if len(parts) > 1 else parts[0]).to(torch.int32)
        mixed = bits >> 15
        mixed ^= bits
        mixed.addcmul_(mixed, mixed, value=SQUARE)
        if len(parts) == 1:
            return mixed.sum(dtype=torch.int64).view(1)
        if len(parts) * LARGE < mixed.numel():
            return torch.stack([words.sum(dtype=torch.int64) for words in mixed.split([len(part) for part in parts])])
        return mixed.cumsum(0, dtype=torch.int64).index_select(0, ends).diff(prepend=ends.new_zeros(1))


def _piece(device: Any) -> int:
    return CPU_PIECE if device.type == "cpu" else PIECE


def magnitudes(torch: Any, tensors: list[Any], device: Any) -> Any:
    """Returns a magnitude for each tensor, which is finite if and only if all of its elements are."""
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    floating = [
        n for n, tensor in enumerate(tensors) if tensor is not None and tensor.numel() and tensor.dtype in floats
    ]
    if floating and all(tensors[number].device.type == "cpu" for number in floating) and device.type == "cpu":
        norms = _on_cpu(torch, [tensors[number].detach() for number in floating])
        if len(floating) == len(tensors):
            return norms
        result = torch.zeros(len(tensors), dtype=torch.float64)
        result[floating] = norms
        return result
    by_device: dict[Any, list[int]] = {}
    for number in floating:
        by_device.setdefault((tensors[number].device, tensors[number].dtype), []).append(number)
    results = [torch.zeros((), dtype=torch.float64, device=device)] * len(tensors)
    for numbers in by_device.values():
        norms = torch.stack(torch._foreach_norm([tensors[n].detach() for n in numbers], float("inf")))
        # Don't make an index tensor of ``numbers``: its copy to the device would wait for running kernels.
        for number, norm in zip(numbers, on(norms, device).unbind(), strict=True):
            results[number] = norm
    return torch.stack(results)


def _on_cpu(torch: Any, tensors: list[Any]) -> Any:
    """Returns the tensors' norms, which a CPU computes several times faster, or else their largest magnitudes.

    The magnitudes are used if a norm isn't finite, which can also be due to overflow.
    """
    norm_list = torch._foreach_norm(tensors)
    alike = len({norm.dtype for norm in norm_list}) == 1
    norms = torch.stack(norm_list if alike else [norm.double() for norm in norm_list]).double()
    if bool(norms.isfinite().all()):
        return norms
    ends = [torch.stack(tensor.aminmax()).double() for tensor in tensors]
    return torch.stack(ends).abs_().amax(1)


def on(numbers: Any, device: Any) -> Any:
    """Copies to ``device`` as float64, without waiting. ``device`` is a CPU only if all tensors are on it."""
    return numbers.double().to(device, non_blocking=True)
