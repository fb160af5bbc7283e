"""The loop, and what it needs: optimizer, schedules, checkpoints, ranks, journal."""
