"""Pages and a JSON API in a browser: play with models, watch runs. Needs the extra `serve`; see docs/howto/look-at-it.md."""

import sys

from discern import VerbPackage

sys.modules[__name__].__class__ = VerbPackage
