"""Who was blamed before: ``memory`` keeps it in the bundle directory, ``repeats`` (pure) says what a repeat tells."""
