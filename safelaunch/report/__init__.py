"""What a person reads of a verdict: the screen, Markdown, HTML; and the files that other viewers read."""

HTML, PERFETTO, SPEEDSCOPE = "report.html", "timeline.perfetto.json", "stacks.speedscope.json"
