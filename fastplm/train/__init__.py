"""Pre-training and fine-tuning runs on the Hugging Face Trainer."""
