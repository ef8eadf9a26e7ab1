"""Programs that start a neuron, with the file names that the public network uses."""
