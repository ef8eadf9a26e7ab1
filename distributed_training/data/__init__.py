"""Rows -> tokens -> batches: the pages that are assigned to a member, always ready."""
