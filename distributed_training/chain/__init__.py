"""Identity: who is registered, who may call, commitments, the block clock, signed HTTP.

``base`` (the protocol and its small types), ``local`` and ``subtensor`` (two chains
that pass one contract test), ``wallet``, ``auth`` and ``replay`` (who is calling), ``admission``,
``trust`` and ``http`` (what a caller may cost), ``server``, ``client``,
``registration`` (deregistered, moved to another uid, a second miner with this hotkey) and
``address`` (where validators reach us).

Nothing is imported here: bittensor takes half a second.
"""
