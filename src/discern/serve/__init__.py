"""Pages and a JSON API in a browser: play with models, watch runs. Needs the extra `serve`; see docs/howto/look-at-it.md."""
