"""Text in, rows out: corpus readers, tokenizer, shards, packing, the stream of batches."""
