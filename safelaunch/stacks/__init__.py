"""What one stack, one system call or one line of source tells."""
