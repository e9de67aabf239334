"""Read and write all files of the project: configs, plans, trials, run directories.

In: values of the other folders, or files.
Out: files, or the same values read back and checked.
Read first: `json_codec`.
"""
