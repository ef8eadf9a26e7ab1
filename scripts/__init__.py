"""The operators' scripts, which are thin wrappers around the package."""
