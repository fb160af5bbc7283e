"""The two towers of Electric, for which transformers has no class."""
