"""Examine this machine, files and runs."""
