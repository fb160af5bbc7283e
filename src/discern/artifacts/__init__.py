"""Writing of outputs: checks of output paths, and atomic files and folders."""
