"""What is left out of a text: near-duplicates, what filters refuse, and evaluation sets that are looked for in it."""
