"""``python -m distributed_training doctor``: everything that can be checked before it costs a day.

    command.py    arguments, the checks in order, the table, --json, exit status
    measure.py    trains for some seconds to know the step time, against what validators want

The checks themselves are the lists of ``distributed_training.health``. Nothing is changed: what is
written to disk or bucket is deleted again.
"""
