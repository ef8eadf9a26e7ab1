"""The reference validator: owns the global bucket, leads the rounds, scores the uploads.

``program`` (start and stop), ``outside`` (what lies beyond the room, from the configuration),
``validator`` (the loop), ``rounds`` (one all-reduce), ``publisher`` (the global state),
``scorer`` and ``evaluator`` (uploads), ``ledger`` (what is known of miners over time), ``events``
(what others follow it by). Nothing is imported here.
"""
