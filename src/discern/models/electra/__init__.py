"""Encoder 'bert': the architecture of BERT and ELECTRA."""
