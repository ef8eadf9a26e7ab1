"""Access the chain and prove identity: registration, callers, commitments and signed HTTP.

``base`` has the chain's small types and its last known state. ``registry`` and ``subtensor`` are
two chains that pass the same contract test. ``identity`` has the wallet and this machine's address.

``auth`` checks who signed a call, and says why a call is refused.

Nothing is imported here, because importing bittensor takes half a second.
"""
