"""The command line.

In: arguments of a shell.
Out: one answer on standard output and an exit code.
Read first: `main`.
"""
