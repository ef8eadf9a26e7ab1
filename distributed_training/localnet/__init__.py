"""Run a whole subnet on one machine: store, chain, validator and miners."""
