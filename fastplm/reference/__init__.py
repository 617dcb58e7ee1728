"""Eager references: each op's specification in plain, readable, differentiable PyTorch."""
