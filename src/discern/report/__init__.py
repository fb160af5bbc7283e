"""Charts, tables, and self-contained HTML pages with one stylesheet."""

import sys

from discern import VerbPackage

sys.modules[__name__].__class__ = VerbPackage
