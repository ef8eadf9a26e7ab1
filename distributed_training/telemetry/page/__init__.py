"""A page that shows what a miner does: served from the files in its run folder.

The page runs in a process of its own, at low priority, and reads ``events.jsonl`` and
``metrics.prom``. So it costs training nothing, shows the past after a restart, and goes on when the
miner stands still: that is when it is looked at.
"""
