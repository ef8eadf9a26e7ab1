"""Define what all peers must agree on, mostly as pure functions.

Light modules: ``types``, ``keys``, ``lines``, ``metadata``, ``manifest``, ``pages``, ``growth``,
``network_report``, ``scoring``. With torch: ``update_file``, ``codecs``, ``average_file``. Nothing
is imported here.
"""
