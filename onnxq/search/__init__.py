"""Search for the fastest accurate plan, by measurements on this machine; no graph is edited here."""
