"""Compile the fusible ops of a captured step into regions, each of which is one op of another program.

In: a captured program.
Out: a program over a smaller graph, whose region ops call kernels that inductor compiled.
Read first: `region_program`.
"""
