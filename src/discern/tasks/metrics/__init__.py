"""The official metrics of the tasks, as fractions in 0-1."""
