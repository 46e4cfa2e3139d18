"""Checks of nodes and of the network between them."""
