"""The chain of a network that has no public chain: who belongs to it, and where each one is found.

One service keeps registrations, commitments, endpoints, weights and a block clock, over HTTP
behind a TLS proxy. :mod:`.ledger` has the rules, :mod:`.store` keeps them in SQLite,
:mod:`.service` answers and shows the page. Its client is ``distributed_training.chain.registry``.
"""
