"""The two ways in which a network exchanges pseudo-gradients: through a store or over hivemind."""
