"""Encoder-decoders whose parts are loaded from checkpoints, or new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import fastplm.hf
import fastplm.models
from fastplm.errors import DataError
from fastplm.finetune.settings import FinetuneArguments
from fastplm.run.checkpoint import config_at, set_dropout, weights_at


def warm_started(
    args: FinetuneArguments, target: Any, start: int | None, end: int
) -> PreTrainedModel:
    """An encoder-decoder whose parts are loaded from checkpoints or newly initialized.

    Args:
        args: the settings.
        target: the tokenizer of the targets.
        start, end: the tokens before and after a target.

    Source: Rothe et al. 2020 (arXiv 1907.12461), §2: RND2RND, BERT2RND, RND2BERT, BERT2BERT,
    BERTSHARE, BERT2GPT, …
    """
    assert args.encoder is not None
    paths = {"encoder": args.encoder, "decoder": args.decoder or args.encoder}
    configs = {part: config_at("finetune", part, path) for part, path in paths.items()}
    config = configs["decoder"]
    name = "encoder" if args.decoder is None else "decoder"
    able = type(config) in transformers.AutoModelForCausalLM._model_mapping
    expected = "a checkpoint of a family with a decoder: BERT, RoBERTa, ELECTRA, GPT-2"
    got = f"{paths['decoder']}, a {config.model_type}"
    args.check(name, able, expected, "Choose another --decoder.", got, DataError)
    config.is_decoder = config.add_cross_attention = True
    if args.target_vocab_size is not None:
        config.vocab_size = len(target)
        config.bos_token_id, config.eos_token_id = start, end
        config.pad_token_id = target.pad_token_id
    # ``fastplm.hf`` has registered the attention.
    ours = args.library == "fastplm"
    options = {"attn_implementation": fastplm.hf.NAME} if ours else {}
    encoder, decoder = (_part(args, part, paths[part], configs[part], options) for part in paths)
    if args.target_vocab_size is not None:  # rows of other tokens may have been loaded
        std = getattr(config, "initializer_range", 0.02)
        torch.nn.init.normal_(decoder.get_input_embeddings().weight, std=std)
    ids = {"decoder_start_token_id": start, "eos_token_id": end}
    ids["pad_token_id"] = target.pad_token_id
    joint = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        encoder.config, decoder.config, **ids
    )
    if args.share:
        joint.tie_encoder_decoder = True
    library: Any = fastplm.models if ours else transformers
    model = library.EncoderDecoderModel(joint, encoder, decoder)
    for name, value in ids.items():
        setattr(model.generation_config, name, value)
    return model


def _part(
    args: FinetuneArguments, part: str, path: str | Path, config: Any, options: dict[str, Any]
) -> Any:
    """The encoder, or the decoder with new cross-attention."""
    encodes = part == "encoder"
    auto: Any = transformers.AutoModel if encodes else transformers.AutoModelForCausalLM
    set_dropout(config, args.dropout)
    if args.warm not in ("both", part):
        return auto.from_config(config, **options)
    options = {**options, "config": config, "dtype": torch.float32}
    options["ignore_mismatched_sizes"] = not encodes and args.target_vocab_size is not None

    def is_new(model: Any, name: str) -> bool:
        """A decoder's cross-attention and head, its embeddings of other tokens, and a pooler."""
        backbone = "" if encodes else f"{model.base_model_prefix}."
        table = model.get_input_embeddings().weight if options["ignore_mismatched_sizes"] else None
        is_table = table is not None and model.get_parameter(name) is table
        return "cross" in name or "pooler." in name or is_table or not name.startswith(backbone)

    expected = f"a checkpoint for the {part}"
    model, _ = weights_at("finetune", part, path, expected, auto, is_new, **options)
    return model
