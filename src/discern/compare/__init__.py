"""Comparison of objectives or configurations at equal cost, with several seeds. Read `run.py` first."""

import sys

from discern import VerbPackage

sys.modules[__name__].__class__ = VerbPackage
