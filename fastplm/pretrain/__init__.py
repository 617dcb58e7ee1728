"""Pre-training: ``fastplm pretrain`` and ``fastplm demo``."""
