"""PTX on the CPU: what Triton's compiler made of a kernel, executed with no GPU.

``parse`` reads the text, ``instructions`` says what each instruction does to the registers of many
threads at once, ``machine`` runs blocks of threads with their barriers and asynchronous work, and
``emulate`` takes the place of kernel launches. It belongs to the tests and is not in the wheel.
"""
