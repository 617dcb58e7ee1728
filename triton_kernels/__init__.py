"""Triton kernels and their launchers: tile arithmetic only.

No autograd, no ``nn.Module``, no registration, and no import of fastplm outside this package. Each
op has a file or a folder of its name; ``_launch.py`` starts every kernel.
"""
