"""Addresses, connections and HTTP clients."""
