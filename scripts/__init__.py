"""Hold the operators' scripts, thin faces of the package."""
