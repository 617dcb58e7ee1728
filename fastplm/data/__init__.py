"""Text to token ids to training batches."""

from fastplm.data._collate import Collator
from fastplm.data.blocks import BlockDataset, TokenStore, tokenize
from fastplm.data.collators import DataCollatorForCausalTokens, DataCollatorForMaskedTokens
from fastplm.data.corpus import TextFiles, embedded_corpus, read_documents
from fastplm.data.denoising import DataCollatorForDenoising
from fastplm.data.packing import PackedDocuments, sequence_index
from fastplm.data.pairs import NextSentencePairs, SentenceChunks, SentenceOrderPairs
from fastplm.data.span_corruption import DataCollatorForSpanCorruption
from fastplm.data.stream import PretrainingStream
from fastplm.data.tokenizer import load_tokenizer, train_tokenizer
from fastplm.data.words import word_ids, word_starts

__all__ = [
    "BlockDataset",
    "Collator",
    "DataCollatorForCausalTokens",
    "DataCollatorForDenoising",
    "DataCollatorForMaskedTokens",
    "DataCollatorForSpanCorruption",
    "NextSentencePairs",
    "PackedDocuments",
    "PretrainingStream",
    "SentenceChunks",
    "SentenceOrderPairs",
    "TextFiles",
    "TokenStore",
    "embedded_corpus",
    "load_tokenizer",
    "read_documents",
    "sequence_index",
    "tokenize",
    "train_tokenizer",
    "word_ids",
    "word_starts",
]
