"""The encoder of ModernBERT: rotary positions, local attention, gated feed-forward, pre-norm."""
