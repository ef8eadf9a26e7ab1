"""Run a miner: the launcher, the ranks, their loop, and rank 0's work alongside it."""
