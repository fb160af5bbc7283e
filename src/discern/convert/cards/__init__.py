"""Model cards. Each has a Jinja template for its text and a module that collects its facts."""
