"""`tierline doctor`: what is wrong with a backend, found by asking it, and the keys of the configuration that mend it.

Rules: it begins with what `tierline check --probe` asks, and goes on only where that went well. A check asks, tells
at most a few findings, and changes nothing; one that gets no answer says so and the others go on. `patient` is what
they share, `report` prints.
"""
