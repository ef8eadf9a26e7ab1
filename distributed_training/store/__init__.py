"""The object store: its kinds, and uploads and downloads that resume after a kill."""
