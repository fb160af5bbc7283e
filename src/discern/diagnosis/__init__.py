"""What is usual in a run, and what is not."""
