"""Reading and writing files safely: atomic files and folders, locks, checksums, and checks of output paths."""
