"""``python -m distributed_training doctor``: everything that can be checked before it costs a day.

    command.py       arguments, the table, --json, exit status
    examination.py   the checks in order: a check is skipped where an earlier one says why
    machine.py       python, torch, memory, disk and its speed, descriptors, shared memory, ports
    outside.py       clock, chain, bucket and line, bootstrap peers, tokenizer, data
    reach.py         --probe: dials another machine's port and says what answers there
    speed.py         batch and step time, against what validators want
    measure.py       trains for some seconds to know the step time (measure_step.py is one rank)

Every check ends as ``ok``, ``warn``, ``fail`` or ``skip`` with a reason; a failure names the
command that mends it. Nothing is changed: what is written to disk or bucket is deleted again.
"""
