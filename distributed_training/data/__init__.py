"""Rows -> tokens -> batches: keeps the pages that are assigned to a member ready for training."""
