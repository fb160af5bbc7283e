"""Rows and batches of a data set: packing, and the deterministic stream."""
