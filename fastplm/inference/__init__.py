"""What is done with a trained model: vectors and scores of texts."""
