"""The object store: client, resumable multipart, publisher, upload rules, cleanup, downloads."""
