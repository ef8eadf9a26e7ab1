"""The object store: its kinds, and uploads and downloads that continue after a kill."""
