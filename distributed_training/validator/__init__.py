"""The reference validator: publishes the global state, leads the rounds, scores the uploads.

``program`` (start and stop, from the configuration), ``validator`` (the loop), ``rounds`` (one
all-reduce), ``global_state`` (the published state, and the first one), ``scorer`` (scoring passes
and the standings that they add up to). Nothing is imported here.
"""
