"""What a person reads of a verdict: the screen, Markdown, HTML; and the files for Perfetto and speedscope."""

HTML, PERFETTO, SPEEDSCOPE = "report.html", "timeline.perfetto.json", "stacks.speedscope.json"
