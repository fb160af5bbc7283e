"""Encoders, their parts and heads."""
