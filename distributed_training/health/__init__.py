"""Check a machine and its surroundings, before and while it trains.

    machine.py    the checks of this machine; a start makes most of them too
    outside.py    the checks of the clock, the chain, the bucket, peers and data
    gpus.py       the GPUs as the driver sees them, and the block that is printed at a start
    bundle.py     the archive of a miner's facts for a helper

Each check ends with ``ok``, ``warn``, ``fail`` or ``skip`` and a reason. A failure also says how to
fix it. ``python -m distributed_training doctor`` runs all checks.
"""
