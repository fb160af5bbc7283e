"""Which positions are corrupted, and with what: pure functions on tensors."""
