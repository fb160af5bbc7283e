"""`discern demo`: every stage, from text found on this machine to an HTML report, in five minutes."""
