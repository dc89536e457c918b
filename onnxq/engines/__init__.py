"""Runtimes that models are run on: here, in other processes, on other machines."""
