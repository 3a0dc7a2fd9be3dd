"""What pyproject.toml cannot say: the hot path compiled, where a C compiler and Python's headers are at hand.

`optional`: without them the build goes on, and `proxy/lane.py` does the same work in Python.
"""

from setuptools import Extension, setup

setup(ext_modules=[Extension("proxy._lane", ["proxy/_lane.c"], optional=True)])
