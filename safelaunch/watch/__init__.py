"""Reading how far the ranks are, and judging whether they still move."""
