"""Plug-in modules, one for each kind that somebody may add from outside of the package."""
