"""Folders that hold a model: runs, fine-tuned models, exports, and models of Hugging Face. `folder.open_model` opens any."""
