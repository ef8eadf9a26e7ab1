"""Access the chain and prove identity: registration, callers, commitments, signed HTTP.

The chain: ``base`` (its small types, and its last known state), ``registry`` and ``subtensor`` (two
chains that pass one contract test), ``identity`` (the wallet, and this machine's address).

``auth``: who signed a call, why one is refused, replays.

Nothing is imported here: bittensor takes half a second.
"""
