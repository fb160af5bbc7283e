"""Encoder 'deberta': the architecture of DeBERTa, DeBERTaV2 and DeBERTaV3."""
