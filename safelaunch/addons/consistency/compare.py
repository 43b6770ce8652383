"""Compares the ranks' numbers to find replicas that differ, and gradients or losses that aren't finite.

Only tensors known to be replicated are compared: DDP's tensors, and DTensors along replicated dimensions. Each kind of
error is reported only once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from safelaunch.addons.consistency.capture import SeriesCheck
from safelaunch.model import WrongResult, rank_words

KEPT = 64  # positions of a series at which some ranks' checks are missing
FEWEST_LOSSES = 20
FAR_LOSS = 2.0  # times the median of the other ranks; it must also exceed all their losses

Side = tuple[int, ...]
_RoundPosition = tuple[int, int]
_Replicas = dict[tuple[Side, str], dict[int, int]]
_FEW_NAMES = 3


class Comparison:
    """Compares the checks of all ranks in one attempt. Call ``add``, then ``new_findings``."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[_RoundPosition, dict[int, SeriesCheck]]] = {}
        self._members: dict[str, set[int]] = {}  # ranks by series
        self._equal: dict[str, int] = {}  # last position at which all replicas were equal, by series
        self._finite: dict[str, int] = {}
        self._losses: dict[int, list[tuple[int, float]]] = {}
        self._reported_topics: set[str] = set()
        self._checks = 0
        self._compared: dict[tuple[Side, str], set[int]] = {}  # compared ranks, by group and tensor
        self._unknown: dict[str, None] = {}  # tensors not known to be replicated, in the optimizer's order

    @property
    def report(self) -> str:
        """Summary of what was compared and what wasn't; empty if there was no check."""
        if not self._checks:
            return ""
        replicated = {name for _, name in self._compared}
        count = len({name for (_, name), ranks in self._compared.items() if ranks})
        checks = f"{self._checks} check{'s'[: self._checks != 1]}"
        if not replicated:
            by_hand = "safelaunch.probes.check_consistent() compares what you know to be equal"
            return f"nothing compared: {checks}, but no tensor is known to be replicated ({by_hand})"
        head = "nothing inconsistent" if count else "nothing compared"
        unknown = [name for name in self._unknown if name not in replicated]
        parts = [f"{head}: {checks}, {count} tensor{'s'[: count != 1]} compared", *self._never()]
        parts += [f"{len(unknown)} not known to be replicated: {_some(unknown)}"] if unknown else []
        return "; ".join(parts)

    def _never(self) -> list[str]:
        by_ranks: dict[Side, dict[str, None]] = {}
        for (group, name), ranks in self._compared.items():
            if absent := tuple(rank for rank in group if rank not in ranks):
                by_ranks.setdefault(absent if ranks else group, {})[name] = None
        return [
            f"NOT compared {'with' if len(ranks) == 1 else 'between'} {rank_words(ranks)}: {_some(list(names))}"
            for ranks, names in sorted(by_ranks.items())
        ]

    def add(self, checks: Iterable[SeriesCheck]) -> None:
        for check in checks:
            series = self._waiting.setdefault(check.about.key, {})
            self._members.setdefault(check.about.key, set()).add(check.rank)
            series.setdefault(check.moment, {})[check.rank] = check
            for old in sorted(series)[: -2 * KEPT]:
                del series[old]
            losses = self._losses.setdefault(check.rank, [])
            losses += check.losses
            del losses[:-FEWEST_LOSSES]

    def new_findings(self, here: Sequence[int], unix_s: float, *, last: bool = False) -> list[WrongResult]:
        """Returns the new findings at positions that all ranks have reached.

        Args:
            here: Ranks on this node.
            last: True if the job has ended: then positions that only some ranks reached are compared, too.
        """
        result = []
        for key, series in self._waiting.items():
            overdue = set(sorted(series)[:-KEPT])
            for moment in sorted(series):
                if last or moment in overdue or self._is_complete(key, moment, here):
                    result += self._compare(key, moment[1], series.pop(moment), unix_s)
        result += self._far_losses(unix_s)
        return [finding for finding in result if self._is_new(finding)]

    def _is_new(self, result: WrongResult) -> bool:
        topic = "buffers" if result.kind == "replicas-diverged" and result.words.startswith("buffers") else result.kind
        new = topic not in self._reported_topics
        self._reported_topics.add(topic)
        return new

    def _is_complete(self, key: str, moment: _RoundPosition, here: Sequence[int]) -> bool:
        checks = self._waiting[key][moment]
        replicas = {rank for check in checks.values() for group in check.about.groups for rank in group}
        expected = (replicas or set(here)) | self._members[key]
        return set(checks) >= expected & set(here)

    def _compare(self, key: str, position: int, checks: Mapping[int, SeriesCheck], unix_s: float) -> list[WrongResult]:
        result = []
        self._checks += 1
        replicas = _replicas(checks)
        for place, prints in replicas.items():
            self._compared.setdefault(place, set()).update(prints if len(prints) > 1 else ())
        replicated = {name for _, name in replicas}
        names = [name for check in checks.values() for name, _ in check.about.tensors]
        self._unknown.update(dict.fromkeys(name for name in names if name not in replicated))
        not_finite = _not_finite(position, self._finite.get(key, 0), checks, unix_s)
        if not_finite is not None:
            result.append(not_finite)
        else:
            self._finite[key] = position
        kind = next(iter(checks.values())).about.kind
        diverged = _diverged(kind, position, self._equal.get(key, 0), replicas, unix_s)
        if diverged is not None:
            result.append(diverged)
        else:
            self._equal[key] = position
        bad_loss = _bad_loss(checks, unix_s)
        return [*result, *([bad_loss] if bad_loss is not None else [])]

    def _far_losses(self, unix_s: float) -> list[WrongResult]:
        recent = {
            rank: [value for _, value in losses]
            for rank, losses in self._losses.items()
            if len(losses) >= FEWEST_LOSSES
        }
        for rank, values in recent.items():
            other_losses = [losses for other, losses in recent.items() if other != rank]
            if len(other_losses) < 2 or not all(math.isfinite(v) for losses in (values, *other_losses) for v in losses):
                continue
            from statistics import fmean, median  # few jobs report their losses

            level = median(fmean(losses) for losses in other_losses)
            if min(values) > max(max(losses) for losses in other_losses) and fmean(values) > FAR_LOSS * abs(level):
                step = self._losses[rank][0][0]
                words = (
                    f"loss: rank {rank} diverged: {fmean(values):.4g} on average since step {step}, while the others "
                    f"are at {level:.4g}"
                )
                return [WrongResult("loss", unix_s, step=step, ranks=(rank,), words=words)]
        return []


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_FEW_NAMES]) + (", ..." if len(names) > _FEW_NAMES else "")


def _between(step: int, since: int) -> str:
    return f"between steps {since} and {step}" if since and since + 1 < step else f"at step {step}"


def _replicas(checks: Mapping[int, SeriesCheck]) -> _Replicas:
    """Returns the fingerprints by rank, for each tensor and each group of ranks that hold replicas of it."""
    prints_of: _Replicas = {}
    for rank, check in sorted(checks.items()):
        about = check.about
        for (name, number), value, size in zip(about.tensors, check.prints, check.sizes, strict=True):
            group = about.groups[number]
            if rank in group and about.rank in (rank, -1):
                prints = prints_of.setdefault((group, name), {})
                if math.isfinite(size):
                    prints[rank] = value
    return prints_of


def _diverged(kind: str, position: int, since: int, replicas: _Replicas, unix_s: float) -> WrongResult | None:
    by_name = {place: prints for place, prints in replicas.items() if len(prints) > 1}
    different = [(name, prints) for (_, name), prints in by_name.items() if len(set(prints.values())) > 1]
    if not different:
        return None
    first, sides = different[0][0], _sides(different[0][1])
    count, total = (len({name for name, *_ in group}) for group in (different, [(name,) for _, name in by_name]))
    off = _off(sides)
    what = f"{count} of {total} {kind}" if count > 1 else first
    more = f", the first is {first}" if count > 1 else ""
    who = f"{rank_words(off)} {'differs' if len(off) == 1 else 'differ'} from the others"
    if not off:
        who = " against ".join(rank_words(side) for side in sides)
    return WrongResult(
        "replicas-diverged",
        unix_s,
        step=position,
        since_step=since,
        parameter=first,
        count=count,
        total=total,
        ranks=off,
        sides=sides,
        words=f"{kind} that should be replicas diverged {_between(position, since)}: {who} in {what}{more}",
    )


def _sides(prints: Mapping[int, int]) -> tuple[Side, ...]:
    by_print: dict[int, list[int]] = {}
    for rank, value in sorted(prints.items()):
        by_print.setdefault(value, []).append(rank)
    return tuple(sorted((tuple(side) for side in by_print.values()), key=lambda side: (-len(side), side)))


def _off(sides: tuple[Side, ...]) -> Side:
    everybody = sum(map(len, sides))
    return tuple(sorted(rank for side in sides[1:] for rank in side)) if 2 * len(sides[0]) > everybody else ()


def _not_finite(position: int, since: int, checks: Mapping[int, SeriesCheck], unix_s: float) -> WrongResult | None:
    """Finds a step with non-finite gradients, and the rank whose gradients were the first."""
    bad = {rank: _bad_names(check) for rank, check in checks.items()}
    if not any(bad.values()):
        return None
    counts = Counter(name for names in bad.values() for name in names)
    starts = {rank: step for rank, check in checks.items() if (step := _first_bad(check.sentinel)) is not None}
    step = min(starts.values(), default=position)
    ranks = tuple(sorted(rank for rank, at in starts.items() if at == step)) if starts else ()
    ranks = ranks or tuple(sorted(rank for rank, names in bad.items() if names))
    names = bad[ranks[0]] or next(names for names in bad.values() if names)
    total = len(next(iter(checks.values())).about.tensors)
    suffix = ": one rank diverged" if len(ranks) == 1 and len(checks) > 1 else ""
    when = f"since step {step}" if starts else _between(step, since)
    return WrongResult(
        "non-finite-gradient",
        unix_s,
        step=step,
        since_step=since,
        parameter=names[-1],
        count=len(counts),
        total=total,
        ranks=ranks,
        words=f"gradients are not finite on {rank_words(ranks)} {when}, the first is that of {names[-1]} "
        f"({len(counts)} of {total}){suffix}",
    )


def _bad_names(check: SeriesCheck) -> list[str]:
    # In the model's order; the backward pass uses the reverse.
    pairs = zip(check.about.tensors, check.gradients, check.sizes, strict=True)
    return [name for (name, _), size, value in pairs if not (math.isfinite(size) and math.isfinite(value))]


def _first_bad(steps: Iterable[tuple[int, float]]) -> int | None:
    return next((step for step, value in steps if not math.isfinite(value)), None)


def _bad_loss(checks: Mapping[int, SeriesCheck], unix_s: float) -> WrongResult | None:
    starts = {rank: step for rank, check in checks.items() if (step := _first_bad(check.losses)) is not None}
    if not starts:
        return None
    step = min(starts.values())
    ranks = tuple(sorted(rank for rank, at in starts.items() if at == step))
    words = f"loss: not finite on {rank_words(ranks)} since step {step}"
    return WrongResult("loss", unix_s, step=step, ranks=ranks, words=words)
