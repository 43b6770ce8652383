"""From evidence to a verdict. ``reading``: what a stack, a system call, a line of source tells. All of it is pure."""
