"""Settings of Sphinx. `docs/_sphinx/build.py` lays out the pages and calls it."""

from __future__ import annotations

import discern

project = "discern"
author = "The discern authors"
copyright = "The discern authors, Apache-2.0"
release = version = discern.__version__

extensions = ["myst_parser"]
root_doc = "index"
source_suffix = {".md": "markdown"}

myst_heading_anchors = 4  # links to headings work as on a code host
myst_enable_extensions = ["linkify"]
myst_linkify_fuzzy_links = False
myst_links_external_new_tab = False

html_theme = "furo"
html_title = "discern"
html_static_path = ["static"]
html_css_files = ["discern.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
highlight_language = "text"
pygments_style = "a11y-light"
pygments_dark_style = "github-dark-high-contrast"
html_theme_options = {
    "sidebar_hide_name": False,
    "light_css_variables": {
        "color-brand-primary": "#1a5fb4",
        "color-brand-content": "#1a5fb4",
        "color-brand-visited": "#1a5fb4",
        "font-stack": "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', 'Noto Sans CJK SC', sans-serif",
    },
    "dark_css_variables": {
        "color-brand-primary": "#8ab4f8",
        "color-brand-content": "#8ab4f8",
        "color-brand-visited": "#8ab4f8",
    },
}
