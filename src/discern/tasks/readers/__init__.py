"""Read task files into examples. Each family of formats has one module."""
