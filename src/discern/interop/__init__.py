"""Files of other libraries: Hugging Face folders and TensorFlow checkpoints, read and written."""
