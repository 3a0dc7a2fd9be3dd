"""`tierline bench`: the study's matrix against a server, or through a gateway, written as a profile.

Rules: a client like any other, on a `Clock`. `stream` asks and notes when tokens came, `text` makes prompts of so many
tokens, `cells` measures one point, `matrix` all of them; `cli` is the command. Nothing is assumed of the server: what
it does not tell is left out of the profile, and said.
"""
