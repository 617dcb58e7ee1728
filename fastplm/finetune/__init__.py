"""Fine-tuning on labelled examples: ``fastplm finetune``."""
