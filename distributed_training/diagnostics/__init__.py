"""What an operator should know before and while training.

``checks`` (one finding, and those a start asks for), ``report`` (the GPU block at start, the
warnings after a step), ``nvml`` (GPUs as the driver sees them). Nothing is imported here: neither
torch nor a driver.
"""
