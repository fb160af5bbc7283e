"""The checker that runs every annotation of the package while tests run: an int may stand for a float, as PEP 484 has it."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
