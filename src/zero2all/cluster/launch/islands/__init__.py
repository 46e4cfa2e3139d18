"""DiLoCo islands at their rendezvous: messages, client, decisions, and the handlers of the server (no torch)."""
