"""What all peers must agree on, as pure functions: no I/O but on what is handed over, no state.

Light: ``types``, ``names``, ``keys``, ``lines``, ``metadata``, ``pt_file``, ``synapses``,
``schedule``.
With numpy: ``pages``. With openskill: ``scoring``. With torch: ``gradients``, ``payload``.
Nothing is imported here.
"""
