"""Tierline: an OpenAI-compatible routing gateway for self-hosted vLLM."""

__version__ = "0.1.0"
