"""`discern demo`: every stage, from text found on this machine to an HTML report, in five minutes."""

import sys

from discern import VerbPackage

sys.modules[__name__].__class__ = VerbPackage
