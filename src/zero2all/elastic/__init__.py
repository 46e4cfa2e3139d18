"""A job on many nodes that survives failures: launcher, agent, rendezvous, heartbeats, failure reports."""
