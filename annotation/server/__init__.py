"""The real Argilla server in an environment of its own: its installation, its start, its users, its backups."""
