"""Cost of backups, and speed of the transfers and the compression of copies."""
