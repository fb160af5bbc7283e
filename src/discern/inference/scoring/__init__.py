"""How likely sentences are: scorers, minimal pairs, and re-ranking of n-best lists."""
