"""Comparison of objectives or configurations at equal cost, with several seeds. Read `run.py` first."""
