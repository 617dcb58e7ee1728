"""Triton kernels and their launchers: tile arithmetic only.

No autograd, no ``nn.Module``, no registration and no import of fastplm. One file per op, named as
the op; ``_launch.py`` is how every kernel is started, ``_compile.py`` how it is compiled without a
GPU.
"""
