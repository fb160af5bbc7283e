"""Tables, figures, one self-contained HTML page."""
