"""``python -m distributed_training doctor``: everything that can be checked before it costs a day.

    command.py          arguments, the checks in order, the table, --json, exit status
    machine.py          python, torch, memory, disk and its speed, descriptors, shared memory, ports
    network_checks.py   clock, chain, bucket and network link, bootstrap peers, tokenizer, data
    reach.py            --probe: dials another machine's port; whether nodes of one miner can meet
    speed.py            batch and step time, against what validators want
    measure.py          trains for some seconds to know the step time

Every check ends as ``ok``, ``warn``, ``fail`` or ``skip`` with a reason; a failure names the
command that mends it. Nothing is changed: what is written to disk or bucket is deleted again.
"""
