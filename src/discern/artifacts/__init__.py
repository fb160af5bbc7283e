"""Folders that hold a model: runs, exports, fine-tuned models, and those of Hugging Face. To be read first: `model_folder`."""
