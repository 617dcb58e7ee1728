"""Pre-training runs on the Hugging Face Trainer."""

from fastplm.train.presets import PRESETS, configuration
from fastplm.train.pretrain import PretrainArguments, pretrain

__all__ = ["PRESETS", "PretrainArguments", "configuration", "pretrain"]
