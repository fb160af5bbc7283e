"""Other formats in and out: Hugging Face folders, model cards."""
