"""The commands of the command line, one file for each; `autotune.cli.app` declares their options.

In: parsed options.
Out: what the command prints or writes.
Read first: `tune`.
"""
