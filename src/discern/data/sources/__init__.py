"""Sources of text: inputs are found, read as bytes, recognized by content, and cut into documents."""
