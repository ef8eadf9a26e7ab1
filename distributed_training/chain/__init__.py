"""Identity: who is registered, who may call, commitments, the block clock, signed HTTP.

``base`` (the protocol and its small types), ``memory``, ``local`` and ``subtensor`` (three chains
that pass one contract test), ``wallet``, ``auth`` and ``replay`` (who is calling), ``admission``
(what a caller may cost), ``server``, ``client``, ``publish`` (write to the chain only what differs)
and ``registration`` (deregistered, moved to another uid, a second miner with this hotkey).

Nothing is imported here: bittensor takes half a second.
"""
