"""The ways in which a network exchanges pseudo-gradients; a package for each."""
