"""Texts and pages about a verdict: the screen, ``report.md`` and ``report.html``."""

HTML, PERFETTO, SPEEDSCOPE = "report.html", "timeline.perfetto.json", "stacks.speedscope.json"
