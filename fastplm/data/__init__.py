"""Text to token ids to training batches."""

from fastplm.data.blocks import BlockDataset, TokenStore, tokenize
from fastplm.data.collators import DataCollatorForMaskedTokens
from fastplm.data.corpus import TextFiles, embedded_corpus, read_documents
from fastplm.data.nsp import NextSentencePairs, SentenceChunks
from fastplm.data.stream import PretrainingStream
from fastplm.data.tokenizer import load_tokenizer, train_tokenizer

__all__ = [
    "BlockDataset",
    "DataCollatorForMaskedTokens",
    "NextSentencePairs",
    "PretrainingStream",
    "SentenceChunks",
    "TextFiles",
    "TokenStore",
    "embedded_corpus",
    "load_tokenizer",
    "read_documents",
    "tokenize",
    "train_tokenizer",
]
