"""Import what a rank needs, only in the fork server: its garbage collector stays off.

A collection finds nothing in what is being imported, and a fifth of the time went into looking.
:func:`rank_group._become_rank` turns it on again in each fork.
"""

import gc

gc.disable()

# ruff: noqa: E402, F401 - the order matters only for who pays for what is shared
import torch
import torch.distributed.fsdp
import transformers.models.llama.modeling_llama

import distributed_training.miner.start
