"""The durable state of the server: the database, the journal, checkpoints, and the crash guard."""
