"""What each command of the command line does, one file a command; `autotune.cli.main` holds their options.

In: parsed options.
Out: what the command prints or writes.
Read first: `session`.
"""
