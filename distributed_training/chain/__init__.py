"""Identity: who is registered, who may call, commitments, the block clock, signed HTTP.

The chain: ``base`` (its small types, and what readers see), ``registry`` and ``subtensor`` (two
chains that pass one contract test), ``registration`` (deregistered, moved to another uid, a second
miner with this hotkey), ``identity`` (the wallet, and where validators reach us).

Calls: ``server`` (what they mean), ``auth`` (who is calling, and why one is refused), ``callers``
(what a caller may cost, replays, what the next start must know), ``http_server`` (bytes and
connections, bounded), ``client`` (calling others).

Nothing is imported here: bittensor takes half a second.
"""
