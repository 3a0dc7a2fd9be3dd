"""The live page in a real browser, in front of a live gateway and simulated backends."""
