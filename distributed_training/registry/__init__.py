"""Keep the members of a network without a public chain, and their addresses.

One service keeps registrations, commitments and endpoints, over HTTP
behind a TLS proxy. :mod:`.ledger` has the rules, :mod:`.store` keeps them in SQLite,
:mod:`.service` answers and shows the page. Its client is ``distributed_training.chain.registry``.
"""
