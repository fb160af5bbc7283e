"""Layered configuration: preset, file, --set, with the origin of every value."""
