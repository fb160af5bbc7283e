"""Fine-tuning an encoder on labeled data. Read `run.py` first."""
