"""Keep the members of a network that has no public chain, and serve them its files."""
