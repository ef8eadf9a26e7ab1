"""Define what all peers must agree on, as pure functions without I/O or state of their own.

Light modules: ``types``, ``keys``, ``lines``, ``metadata``, ``manifest``, ``scoring``. With numpy:
``pages``. With torch: ``update_file``, ``codecs``, ``average_file``. Nothing is imported here.
"""
