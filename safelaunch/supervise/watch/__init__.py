"""When has a job stopped making progress? Pure, except for ``job``, which reads the pages of the ranks."""
