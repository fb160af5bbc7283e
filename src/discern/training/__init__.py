"""The training loop with its optimizer, schedule, checkpoints, ranks and metrics log."""
