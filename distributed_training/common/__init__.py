"""Helpers for every package that no library has: files, processes, ports, back-off, HTTP."""
