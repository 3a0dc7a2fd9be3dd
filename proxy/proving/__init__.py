"""`tierline gate`: whether what a server says is right. The study's functional gates, and agreement with a reference.

Rules: temperature 0, whole answers, the text behind the thinking is judged. A test that could not be asked is a
failed one. `tasks` asks and judges, `agree` compares, `cli` is the command; what is found is kept by
`policies.gatefile`.
"""
