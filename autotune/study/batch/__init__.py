"""Choose the batch size of a study: by estimate on fake tensors, then by measurement under the enforced limit.

In: a config whose objective is `batch` or `throughput`, and a source of runners.
Out: a config with the chosen batch size and micro-batches, for an ordinary study; and the record of the search.
Read first: `choice`.
"""
