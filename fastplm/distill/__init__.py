"""Distillation: ``fastplm distill``."""
