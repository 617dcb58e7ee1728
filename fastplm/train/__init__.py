"""Pre-training runs on the Hugging Face Trainer."""
