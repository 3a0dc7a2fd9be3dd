"""Discrete events on a virtual clock: traffic, the engine model, and the live gateway's own policy between them."""
