"""Runs trained as lanes of one network."""
