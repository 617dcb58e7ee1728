"""Translate with a BERT2BERT, warm-started from a BERT checkpoint or cold, and show its loss.

    python examples/train_bert2bert.py --checkpoint bert --source train.en.gz --target train.de.gz \
        --valid-source val.en.gz --valid-target val.de.gz --steps 500

Line n of the target is line n of the source in the other language (or shorter, or simpler). With
``--cold`` only the sizes and the tokenizer come from the checkpoint. The batches are the same, so
comparing the two losses shows the gain of the warm start.

Source: Rothe et al. 2020 (arXiv 1907.12461).
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path
from typing import Any

from transformers import (
    AutoTokenizer,
    BertConfig,
    DataCollatorForSeq2Seq,
    EncoderDecoderConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

from fastplm.models import EncoderDecoderModel


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--checkpoint", required=True, help="folder of a BERT and its tokenizer")
    parser.add_argument("--source", required=True, help="text, a line a sample; may end in .gz")
    parser.add_argument("--target", required=True)
    parser.add_argument("--valid-source", required=True)
    parser.add_argument("--valid-target", required=True)
    parser.add_argument("--cold", action="store_true", help="start both parts from random weights")
    parser.add_argument("--share", action="store_true", help="one set of weights for both parts")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--eval-every", type=int, help="steps; only at the end if left out")
    parser.add_argument("--eval-samples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--out", default="runs/bert2bert")
    args = parser.parse_args()

    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    model = make_model(args, tokenizer)
    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(
            output_dir=args.out,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            per_device_eval_batch_size=args.batch_size,
            learning_rate=args.learning_rate,
            warmup_steps=args.steps // 10,
            eval_strategy="steps" if args.eval_every else "no",
            eval_steps=args.eval_every,
            prediction_loss_only=True,
            save_strategy="no",
            report_to="none",
            bf16=args.bf16,
            seed=args.seed,
        ),
        train_dataset=read_pairs(args.source, args.target, tokenizer, args.max_length),
        eval_dataset=read_pairs(args.valid_source, args.valid_target, tokenizer, args.max_length)[
            : args.eval_samples
        ],
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )
    before = trainer.evaluate()["eval_loss"]
    seconds = trainer.train().metrics["train_runtime"]
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model(args.out)
    tokenizer.save_pretrained(args.out)

    example = tokenizer(read_lines(args.valid_source)[0], return_tensors="pt").to(model.device)
    tokens = model.eval().generate(example.input_ids, num_beams=4, max_new_tokens=args.max_length)
    print(f"{tokenizer.decode(example.input_ids[0], skip_special_tokens=True)} -> ", end="")
    print(tokenizer.decode(tokens[0], skip_special_tokens=True))
    print(
        f"{'cold' if args.cold else 'warm'} start: validation loss {before:.4f} -> {after:.4f} "
        f"after {args.steps} steps, {seconds:.0f} s of training"
    )


def make_model(args: argparse.Namespace, tokenizer: Any) -> Any:
    """A BERT2BERT that begins with [CLS] and ends with [SEP]."""
    special = {"pad_token_id": tokenizer.pad_token_id, "tie_encoder_decoder": args.share}
    if args.cold:
        sizes = BertConfig.from_pretrained(args.checkpoint)
        config = EncoderDecoderConfig.from_encoder_decoder_configs(sizes, sizes, **special)
        model = EncoderDecoderModel(config)
    else:
        model = EncoderDecoderModel.from_encoder_decoder_pretrained(
            args.checkpoint, args.checkpoint, **special
        )
    model.config.decoder_start_token_id = tokenizer.cls_token_id
    model.generation_config.decoder_start_token_id = tokenizer.cls_token_id
    model.generation_config.eos_token_id = tokenizer.sep_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def read_lines(path: str) -> list[str]:
    opened = gzip.open if Path(path).suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        return [line.rstrip("\n") for line in file]


def read_pairs(source: str, target: str, tokenizer: Any, max_length: int) -> list[dict[str, Any]]:
    sides = []
    for path in (source, target):
        encoded = tokenizer(
            read_lines(path),
            truncation=True,
            max_length=max_length,
            return_token_type_ids=False,
        )
        sides.append(encoded["input_ids"])
    # The decoder starts from [CLS], and has to predict the rest.
    return [
        {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels[1:]}
        for ids, labels in zip(*sides, strict=True)
    ]


if __name__ == "__main__":
    main()
