"""Define what all peers must agree on, as pure functions without I/O or state of their own.

Light modules: ``types``, ``keys``, ``lines``, ``metadata``, ``pt_file``, ``scoring``,
``synapses``. With numpy: ``pages``. With torch: ``gradients``. Nothing is imported here.
"""
