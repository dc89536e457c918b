"""Certificates: probes in a written model that tell whether it computes the same where it runs."""
