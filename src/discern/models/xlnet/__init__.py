"""Encoder 'xlnet': relative positions, memory, and two streams of attention."""
