"""One file a verb: builds the parts and runs them."""
