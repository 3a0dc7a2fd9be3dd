"""A stand-in for a vLLM server, for tests and demos: the engine model of `policies.engine` behind vLLM's wire.

Rules: nothing of the gateway depends on this. What it says on the wire is held to recorded answers of a real
vLLM (tests/captures); what it takes to say it comes from a profile. docs/simulator.md describes it.
"""
