"""discern: train text encoders to tell real tokens from replaced ones."""

__version__ = "0.1.0"
