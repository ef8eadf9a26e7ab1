"""Run the reference validator: it leads rounds, judges uploads, publishes the global state.

``program`` (start and stop, from the configuration), ``validator`` (the loop), ``store_rounds`` (a
round, of which ``fetch_close``, ``judge_close`` and ``average`` are the parts),
``global_state`` (the published states, the first one too), ``standings`` (scores). Nothing is
imported here.
"""
