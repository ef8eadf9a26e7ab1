"""Helpers for every package that no library has: durable files, processes, ports, back-off."""
