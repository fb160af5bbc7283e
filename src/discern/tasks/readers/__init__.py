"""One file a family of formats: task files in, examples out."""
