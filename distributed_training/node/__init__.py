"""What a miner and a validator both are: a hotkey on the subnet, a bucket, a run folder.

``start`` (run folder, log, tokenizer), ``signals`` (a request to stop), ``chain`` (wallet, chain,
uid), ``announce`` (what the node writes to the chain, and whether it stays there), ``buckets`` (its
own bucket, checked). Nothing is imported here.
"""
