"""Start a neuron by the file names of the public network."""
