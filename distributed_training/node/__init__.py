"""Start a neuron (a miner or validator): open its run folder, its bucket and the chain.

``start``: run folder, log, tokenizer; errors that end a start, signals that end a node.
``identity``: wallet, chain, uid; writing the neuron's entries to the chain; whether the chain
belongs to this network. ``buckets``: the node's own bucket, with checks, and other buckets.
``published``: the network's files in the global bucket. Nothing is imported here.
"""
