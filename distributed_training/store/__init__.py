"""The object store: client, resumable multipart, uploader, upload rules, cleanup, downloads."""
