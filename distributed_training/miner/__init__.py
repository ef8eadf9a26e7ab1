"""Run a miner: the launcher, the ranks, the loop and what rank 0 does next to it."""
