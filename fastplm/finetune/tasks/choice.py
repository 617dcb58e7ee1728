"""The right one of several answers."""

from __future__ import annotations

from typing import Any

from fastplm.data.examples import Example, read_choices
from fastplm.finetune.metrics import accuracy
from fastplm.finetune.models import check_reads_both_ways
from fastplm.finetune.settings import FinetuneArguments
from fastplm.finetune.tasks._task import Collator, Feature, Featured, Logits, Scored, Task

#: The model classes of the families that ``AutoModelForMultipleChoice`` does not know.
_DOUBLE_HEADS = {"gpt2": "GPT2DoubleHeadsModel", "openai-gpt": "OpenAIGPTDoubleHeadsModel"}


class Choice(Task):
    """Choose one of several answers. The model reads the question with each of them."""

    auto = "AutoModelForMultipleChoice"
    collator_class = "DataCollatorForMultipleChoice"

    @classmethod
    def check_model(cls, args: FinetuneArguments, config: Any) -> None:
        check_reads_both_ways(args, config)

    @classmethod
    def read(cls, args: FinetuneArguments, path: Any, targets: Any, length: int) -> list[Example]:
        return read_choices(path)

    def prepare(self) -> None:
        self.check_texts()
        self.with_lm_head = self.family in _DOUBLE_HEADS
        if self.with_lm_head:
            self.auto, self.output_names = _DOUBLE_HEADS[self.family], ("mc_logits",)

    def features(self, examples: list[Example]) -> Featured:
        pairs = [(e.texts[0], choice) for e in examples for choice in e.texts[1:]]
        first, second = (list(column) for column in zip(*pairs, strict=True))
        encoded = self.tokenizer(first, second, truncation=True, max_length=self.limit)
        features, start = [], 0
        for example in examples:
            end = start + len(example.texts) - 1
            feature = {name: encoded[name][start:end] for name in encoded}
            features.append({**feature, "labels": example.target})
            start = end
        return features, [None] * len(features)

    def collator(self) -> Collator:
        """A double-heads GPT classifies the last token of each choice, its extract token."""
        collator = super().collator()

        def collate(features: list[Feature]) -> Any:
            batch = collator(features)
            batch["mc_labels"] = batch.pop("labels")
            batch["mc_token_ids"] = batch["attention_mask"].sum(-1) - 1
            return batch

        return collate if self.with_lm_head else collator

    def _outputs(self, model: Any, **batch: Any) -> Any:
        if "sample_index" in batch:
            batch["sample_index"] = batch["sample_index"].flatten()
        if not self.with_lm_head:
            return model(**batch)
        if self.args.library == "transformers":
            # Transformers' GPT takes no mask [B, C, T]. It needs none: attention is causal, and
            # padding comes after the text.
            batch.pop("attention_mask")
        else:
            batch["output_logits"] = False
        outputs = model(**batch)
        outputs["loss"] = outputs.get("mc_loss")
        return outputs

    def score(self, examples: list[Example], notes: list[Any], logits: list[Logits]) -> Scored:
        chosen = [int(scores.argmax()) for (scores,) in logits]
        return {"accuracy": accuracy(chosen, [e.target for e in examples])}, chosen

    def chance(self) -> float:
        return 1 / (len(self.test[0].texts) - 1)
