"""Pre-training, and what is done with a run: estimate, warm start, evaluate, adapt, bench, diagnose. Read `run.py` first."""
