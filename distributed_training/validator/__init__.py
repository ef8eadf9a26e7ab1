"""Run the reference validator: it publishes the global state, leads rounds, scores uploads.

``program`` (start and stop, from the configuration), ``validator`` (the loop), ``rounds`` (one
all-reduce). ``global_state`` (the published states, the first one too), ``scorer``
(scoring passes and the standings that they add up to). Nothing is imported here.
"""
