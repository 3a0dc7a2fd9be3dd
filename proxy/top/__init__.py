"""`tierline top`: what a running gateway does now, from its admin listener and its metrics."""
