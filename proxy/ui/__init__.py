"""The live page on the admin listener: static files, and the JSON that they ask for (docs/ui.md)."""
