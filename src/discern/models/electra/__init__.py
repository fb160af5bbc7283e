"""Encoder 'bert': the architecture of BERT and ELECTRA, and the two towers of Electric."""
