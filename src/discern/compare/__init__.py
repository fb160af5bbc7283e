"""Comparison of objectives or configurations at equal cost, with several seeds. `run.py` is the page to read first."""
