"""What discern writes: which outputs are allowed, and how files and folders appear whole or not at all."""
