"""What a person reads of a verdict: the screen, Markdown, HTML."""
