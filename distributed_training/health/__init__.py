"""Check a machine and its surroundings, before and while it trains.

    machine.py    the list of checks of this machine, and whether the machines of one miner can
                  meet; those of it that a start makes too
    outside.py    the list of checks of clock, chain, bucket, peers and data
    gpus.py       GPUs as the driver sees them; the block at start

Each check ends as ``ok``, ``warn``, ``fail`` or ``skip`` with a reason; a failure names the command
that fixes it. ``python -m distributed_training doctor`` makes all of them.
"""
