"""Run the reference validator: it leads rounds, judges uploads, publishes the global state.

``program`` (start and stop, from the configuration), ``store_rounds`` (the loop and its rounds, of
which ``closes`` and ``average`` are the parts), ``global_state`` (whose the bucket is),
``standings`` (scores). Nothing is imported here.
"""
