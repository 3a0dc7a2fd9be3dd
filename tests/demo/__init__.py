"""`make demo`: two servers (simulated, or real ones), the gateway and half a minute of mixed traffic, shown live."""
