"""`make demo`: two real llama-servers, the gateway, half a minute of mixed traffic, shown live."""
