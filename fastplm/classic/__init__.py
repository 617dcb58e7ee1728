"""The systems before BERT, small, as baselines: ELMo, Skip-thoughts, Quick-thoughts, word2vec."""
