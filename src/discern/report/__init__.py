"""Charts, tables, and self-contained HTML pages with one stylesheet."""
