"""Rows -> tokens -> batches: the pages that uid and block assign, always ready."""
