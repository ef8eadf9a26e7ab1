"""Start a neuron: a hotkey on the subnet, a bucket, a run folder, for miner and validator.

``start`` (run folder, log, tokenizer; errors that end a start, signals that end a node),
``identity`` (wallet, chain, uid; the neuron's entries on the chain, and whether they stay there;
whether the chain is this network's), ``buckets`` (its own bucket, checked, and others').
Nothing is imported here.
"""
