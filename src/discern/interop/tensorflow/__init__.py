"""Checkpoints of TensorFlow, read without it: the format is two kinds of files, and it is stable."""
