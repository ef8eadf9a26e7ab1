"""Run the reference validator: it leads rounds, judges uploads and publishes the global state.

``program`` starts and stops it, as configured. ``store_rounds`` has the loop and its rounds;
``closes`` and ``average`` are parts of them. ``global_state`` checks which network the bucket
belongs to, and ``standings`` keeps the scores. Nothing is imported here.
"""
