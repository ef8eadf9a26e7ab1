"""The object store: client, resumable multipart, publisher, gate, cleanup, downloads."""
