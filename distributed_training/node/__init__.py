"""Start a neuron: a hotkey on the subnet, a bucket, a run folder, for miner and validator.

``start`` (run folder, log, tokenizer), ``signals`` (a request to stop), ``identity`` (wallet,
chain, uid; the neuron's entries on the chain, and whether they stay there). ``network`` (whether
the chain is this network's), ``buckets`` (its own bucket, checked, and others'), ``global_state``
(read from its files), ``failures`` (exit statuses). Nothing is imported here.
"""
