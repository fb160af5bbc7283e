"""Folders that hold a model: runs, exports, fine-tuned models, and Hugging Face models. Read `model_folder` first."""
