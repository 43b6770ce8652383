"""Presents a verdict: on the screen, in ``report.md``, and on the page ``report.html``."""

HTML, PERFETTO, SPEEDSCOPE = "report.html", "timeline.perfetto.json", "stacks.speedscope.json"
