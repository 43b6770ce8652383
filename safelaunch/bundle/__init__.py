"""The bundle: assembled privately, published whole, shown as a report."""
