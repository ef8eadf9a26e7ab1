"""Helpers for all packages that no library provides: files, processes, ports, back-off, HTTP."""
