"""What a miner and a validator both are: a hotkey on the subnet, a bucket, a run folder.

``start`` (run folder, log, tokenizer), ``signals`` (a request to stop), ``identity`` (wallet,
chain, uid; what the node writes to the chain, and whether it stays there), ``network`` (whether the
chain is this network's), ``buckets`` (its own bucket, checked, and others'), ``global_state`` (read
from its files), ``failures`` (exit statuses). Nothing is imported here.
"""
