"""Model cards: Jinja templates for the text, and a module each that gathers the facts."""
