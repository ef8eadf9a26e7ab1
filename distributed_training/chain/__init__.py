"""Access the chain and prove identity: registration, callers, commitments, signed HTTP.

The chain: ``base`` (its small types, and its last known state), ``registry`` and ``subtensor`` (two
chains that pass one contract test). ``registration`` (deregistered, moved to another uid, a second
miner with this hotkey), ``identity`` (the wallet, and the endpoint for validators).

Calls: ``server`` (their meaning), ``auth`` (who is calling, why one is refused, replays, the file
for the next start). ``http_server`` (bounds on a caller's bytes and connections),
``client`` (calling others).

Nothing is imported here: bittensor takes half a second.
"""
