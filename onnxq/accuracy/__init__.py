"""Accuracy: methods that buy decibels, each kept only where it lowers noise on samples that it has not used."""
