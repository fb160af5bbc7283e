"""Exports, imports and their model cards."""
