"""Jobs as they are written, placeholders and all, before a matrix is expanded."""

from __future__ import annotations

from dataclasses import dataclass, field

from safelaunch.colaunch.grid import Matrix
from safelaunch.colaunch.placeholders import Text


@dataclass(frozen=True, slots=True)
class Template:
    """One entry of ``jobs``, or the one job of a grid; ``group`` is its key, empty where it has none.

    ``options``: words for safelaunch that stand before ``command``. ``needs``: names of groups or of jobs.
    """

    group: str
    where: str
    command: tuple[Text, ...]
    matrix: Matrix = field(default_factory=Matrix)
    name: Text | None = None
    options: tuple[Text, ...] = ()
    env: tuple[tuple[str, Text], ...] = ()
    cwd: Text | None = None
    needs: tuple[Text, ...] = ()
    gpus: int = 1
    ports: int = 0
    timeout_s: float | None = None
    retries: int = 0
    metrics: tuple[str, ...] = ()
    metric_file: Text | None = None

    def working_texts(self) -> tuple[Text, ...]:
        """Where a parameter must stand to make a difference."""
        cwd = () if self.cwd is None else (self.cwd,)
        return (*self.command, *self.options, *(text for _, text in self.env), *cwd)

    def other_texts(self) -> tuple[Text, ...]:
        return (*self.needs, *(text for text in (self.name, self.metric_file) if text is not None))
