"""Access the chain and prove identity: registration, callers, commitments, signed HTTP.

The chain: ``base`` (its small types, and its last known state), ``registry`` and ``subtensor`` (two
chains that pass one contract test). ``registration`` (deregistered, moved to another uid, a second
miner with this hotkey), ``identity`` (the wallet, and the endpoint for validators).

``auth``: who signed a call, why one is refused, replays.

Nothing is imported here: bittensor takes half a second.
"""
