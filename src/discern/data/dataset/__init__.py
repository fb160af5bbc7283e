"""A data set on disk: its manifest, its shards, and how they are written and read."""
