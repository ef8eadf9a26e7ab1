"""Identity: who is registered, who may call, commitments, the block clock, signed HTTP.

The chain: ``base`` (the protocol and its small types), ``known`` (what readers see), ``local`` and
``subtensor`` (two chains that pass one contract test), ``registration`` (deregistered, moved to
another uid, a second miner with this hotkey), ``address`` (where validators reach us), ``wallet``.

Calls: ``server`` (what they mean), ``auth`` and ``replay`` (who is calling), ``listener``,
``admission``, ``trust`` and ``http`` (what a caller may cost), ``refusals``, ``kept`` (what the
next start must know), ``client`` (calling others).

Nothing is imported here: bittensor takes half a second.
"""
