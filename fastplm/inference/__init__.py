"""What is done with trained models: scores of texts, vectors of words and texts."""
